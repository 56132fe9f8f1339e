"""`multimodal search "a red car" PHOTO...`: rank images by a sentence."""

import argparse
import json

import torch

from tasks.clip.labels import warn_of_cut
from tasks.clip.photos import Photos, add_cache_argument
from tasks.clip.sheet import Sheet
from tasks.errors import UsageError, one_line
from tasks.predict import add_image_arguments, check_output, csv_line, image_paths, positive

TOP_K = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument("sentence", metavar="SENTENCE", help="what is looked for")
    add_image_arguments(parser, batch_size=32)
    parser.add_argument(
        "--top-k", type=positive, default=TOP_K, metavar="K", help=f"images that are named (default: {TOP_K})"
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--json", action="store_true", help="print a JSON object on one line for each image")
    group.add_argument("--csv", action="store_true", help="print a table of path and similarity")
    parser.add_argument("--sheet", metavar="FILE", help="draw the images that are named, as PNG, there")
    add_cache_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Rank; 1 where an image could not be read, which is named while the others are ranked."""
    try:
        if not args.sentence.strip():
            raise ValueError("the sentence is empty, expected what is looked for")
        paths = image_paths(args.paths)
        check_output("--sheet", args.sheet, paths)
        photos = Photos.load(args)
        sentence = photos.embedder.labels([args.sentence], ["{}"])
    except (ValueError, OSError) as error:
        raise UsageError(one_line(error)) from error
    warn_of_cut(photos.embedder, [args.sentence], ["{}"])
    code, found = photos.of(paths, args.batch_size)
    sheet = Sheet()
    if args.csv:
        print(csv_line("path", "similarity"))
    if found:
        similarity = (torch.stack(list(found.values())) @ sentence.T)[:, 0]
        order = similarity.argsort(descending=True, stable=True)[: args.top_k].tolist()
        names = list(found)
        for index in order:
            print(_shown(names[index], float(similarity[index]), args))
            sheet.add(names[index], [f"{similarity[index]:.3f}"])
    if args.sheet is not None:
        sheet.save(args.sheet)
    return code


def _shown(path: str, similarity: float, args: argparse.Namespace) -> str:
    if args.json:
        return json.dumps({"path": path, "similarity": round(similarity, 6)}, ensure_ascii=False)
    if args.csv:
        return csv_line(path, f"{similarity:.6f}")
    return f"{similarity:7.4f}  {path}"
