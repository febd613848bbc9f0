#!/usr/bin/env bash
# Makes pretrain_gpt.py of a Megatron-LM checkout install the plugin: ./scripts/apply_patch.sh DIR [--reverse]
# Checks before it writes, changes nothing if it has been done before, and takes everything back with --reverse.
set -euo pipefail

patches=$(cd "$(dirname "${BASH_SOURCE[0]}")/../patches" && pwd)

refuse() {
  printf 'apply_patch.sh: %s\n' "$*" >&2
  exit 2
}

usage="call it as ./scripts/apply_patch.sh DIR [--reverse], where DIR is a Megatron-LM checkout"
directory='' reverse=''
for word in "$@"; do
  case $word in
    --reverse) reverse=yes ;;
    -*) refuse "there is no option $word: $usage" ;;
    *)
      [[ -z $directory ]] || refuse "$directory and $word are two folders: $usage"
      directory=$word
      ;;
  esac
done
[[ -n $directory ]] || refuse "no folder is given: $usage"
[[ -d $directory ]] || refuse "there is no folder $directory: $usage"
directory=$(cd "$directory" && pwd)
package=$directory/megatron/core/package_info.py
[[ -f $package && -f $directory/pretrain_gpt.py ]] ||
  refuse "$directory is no Megatron-LM checkout, as it lacks megatron/core/package_info.py or pretrain_gpt.py: give" \
    "the folder that git clone made"
command -v git >/dev/null || refuse "it needs git, which isn't on the PATH: install git"

# What the file assigns to MAJOR, MINOR, PATCH or PRE_RELEASE. It isn't run: that would import Megatron.
field() {
  sed -n "s/^$1 *= *['\"]\\{0,1\\}\\([A-Za-z0-9.]*\\).*/\\1/p" "$package"
}

version=$(field MAJOR).$(field MINOR).$(field PATCH)$(field PRE_RELEASE)
patch=$patches/megatron-lm-$version.patch
if [[ ! -f $patch ]]; then
  known=$(cd "$patches" && printf '%s\n' megatron-lm-*.patch | sed 's/megatron-lm-\(.*\)\.patch/\1/' | paste -sd ' ')
  refuse "$directory is Megatron-LM $version, and there is a patch for $known only: check that release out, or use" \
    "the launcher, which needs no patch"
fi

# git would apply a patch to the repository around a folder that isn't one itself, and skip it without a word.
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE
GIT_CEILING_DIRECTORIES=$(dirname "$directory")
export GIT_CEILING_DIRECTORIES

apply() {
  git -C "$directory" apply "$@" "$patch"
}

# Which way to go, and which way is open if that has been done before.
forth=(--check) back=(--check --reverse) did="patched" was="is patched already"
if [[ -n $reverse ]]; then
  forth=(--check --reverse) back=(--check) did="as it was before the patch" was="isn't patched"
fi
if apply "${back[@]}" 2>/dev/null; then
  echo "$directory $was: nothing to do."
  exit
fi
if ! told=$(apply "${forth[@]}" 2>&1); then
  file=$(sed -n 's/^error: \(.*\): patch does not apply$/\1/p; s/^error: \(.*\): No such file or directory$/\1/p' \
    <<<"$told")
  file=${file%%$'\n'*}
  [[ -n $file ]] || refuse "git says: $told"
  refuse "$file in $directory isn't that of Megatron-LM $version where the patch belongs: put it back with 'git" \
    "checkout -- $file', or write the two lines of $patch by hand"
fi
mapfile -t files < <(sed -n 's#^+++ b/##p' "$patch")
for file in "${files[@]}"; do
  # git writes a new file and puts it in the place of the old one.
  [[ -w $directory/$file && -w $(dirname "$directory/$file") ]] ||
    refuse "$directory/$file can't be written by $(id -un): call this as its owner, or copy the checkout"
done
apply "${forth[@]:1}"
echo "$directory is $did (Megatron-LM $version): ${files[*]}"
helpers=megatron/core/datasets/helpers_cpp
if [[ -z $reverse ]] && ! compgen -G "$directory/$helpers*.so" >/dev/null; then
  echo "It has no compiled $helpers yet, and hides that of an installed megatron-core. Megatron compiles it at the first" \
    "start, which takes make, a C++ compiler and pip install pybind11. Without those copy the installed one:"
  echo "  (cd / && cp \"\$(python -c 'import megatron.core.datasets.helpers_cpp as h; print(h.__file__)')\"" \
    "$(printf %q "$directory/megatron/core/datasets/"))"
fi
