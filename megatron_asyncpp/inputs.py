"""Files, folders and intervals that a run needs. Megatron finds out that one is missing late, and on every rank."""

from __future__ import annotations

import importlib.util
import tempfile
from argparse import Namespace
from pathlib import Path

from megatron_asyncpp.errors import AsyncPPError


def check(args: Namespace) -> None:
    """Check what Megatron's arguments name, before any process group.

    Raises:
        AsyncPPError: something is missing or can't be written to.
    """
    if not (args.eval_interval or args.full_validation or args.skip_train):
        raise AsyncPPError(
            "Megatron counts its evaluations by --eval-interval, even where --eval-iters 0 makes none: add it, such as "
            "--eval-interval 1000"
        )
    if args.save is not None:
        if not args.save_interval:
            raise AsyncPPError("--save needs --save-interval, every how many iterations: add it, or leave out --save")
        check_folder("--save", args.save)
    _check_tokenizer(args)


def check_folder(flag: str, folder: str | Path) -> None:
    """Make a folder, and see that it can be written to.

    Args:
        flag: that names it.
        folder: in a file system; what has a scheme, as msc://, is left to who knows it.

    Raises:
        AsyncPPError: it can't.
    """
    if "://" in str(folder):
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise AsyncPPError(
            f"{flag} {folder} can't be written to ({error.strerror}): give a folder that you may write to"
        ) from error


def _check_tokenizer(args: Namespace) -> None:
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        value = getattr(args, name)
        # What has no slash at its beginning may be a name on Hugging Face's hub as well.
        if value is not None and value.startswith(("/", "./", "../", "~")) and not Path(value).expanduser().exists():
            raise AsyncPPError(f"--{name.replace('_', '-')} {value} isn't there: give the tokenizer's file or folder")
    if args.tokenizer_type == "HuggingFaceTokenizer" and importlib.util.find_spec("transformers") is None:
        raise AsyncPPError(
            "--tokenizer-type HuggingFaceTokenizer needs transformers, which isn't installed: pip install transformers"
        )
