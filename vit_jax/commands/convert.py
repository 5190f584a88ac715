r"""Convert weights between this package, timm and Hugging Face, bit for bit.

  vit_jax convert SRC DST [--to=npz|timm|hf|peft|pth|workdir]
  vit_jax convert SRC --to=hf|timm --push=hf://OWNER/NAME

SRC is a published .npz, a .safetensors or .bin file of timm, Hugging Face or
open_clip or a folder with such a file, a checkpoint of another training program
(.pth, .ckpt), a .pth file released with DETR, or the workdir of a run; local, at gs://,
a URL, or hf://OWNER/NAME[@REVISION][/FILE]. DST is

  npz       a file that the original's readers and timm's `load_npz` read
  timm      a folder for timm.create_model('local-dir:DST', pretrained=True)
  hf        a folder for ViTForImageClassification.from_pretrained(DST), for
            DetrForObjectDetection, ImageGPTForCausalImageModeling, CLIPModel
            or SiglipModel
  peft      a folder with the adapters of a run (config.lora) of a ViT, for
            PeftModel.from_pretrained(base, DST)
  pth       a detector under the names of the files released with DETR: a .pth
            file, which needs PyTorch, or a .safetensors file
  workdir   a folder for vit_jax predict, for --config.pretrained, and for
            vit_jax evaluate

A detector can be written as hf, pth or workdir, an iGPT with its palette as hf or
workdir, an image-text model as npz or workdir and a CLIP or SigLIP also as hf, a
classifier as all formats except pth. Examples:

  vit_jax convert ViT-B_16.npz /tmp/b16_timm --to=timm
  vit_jax convert /tmp/run /tmp/run.npz
  vit_jax convert hf://google/vit-base-patch16-224 /tmp/b16 --to=workdir
  vit_jax convert detr-r50-e632da11.pth /tmp/detr --to=workdir
  vit_jax convert last.pth.tar /tmp/last --to=hf --entry=state_dict
  vit_jax convert hf://OWNER/ADAPTER /tmp/merged --to=hf --base=hf://OWNER/NAME

--push uploads the folder to the Hugging Face Hub, with a card that explains how to load
the model and, for a workdir, lists its data and metrics. It needs a token (hf auth
login, or HF_TOKEN); a model that does not exist is created as a public one.

The arrays are only renamed, transposed and reshaped. Differences in computation (the
GELU, the epsilons of norms) are written to the config of DST, or reported.
"""

import argparse
from collections.abc import Sequence

from etils import epath

from vit_jax import console
from vit_jax.commands import flags
from vit_jax.distributed import files, text_files


def make_parser() -> flags.Parser:
  """Returns the parser of the command."""
  parser = flags.Parser('convert', __doc__)
  parser.add_argument('src', metavar='SRC', help='weights in any format')
  parser.add_argument('dst', metavar='DST', nargs='?', help='file or folder to write')
  parser.add_argument(
    '--push',
    metavar='hf://OWNER/NAME',
    help='upload to the hub instead of writing DST',
  )
  parser.add_argument(
    '--to',
    help='format of DST: npz, timm, hf, peft, pth or workdir (npz or pth if DST ends so)',
  )
  parser.add_argument(
    '--class_names',
    help='file with one name per line, or a .json list; for a detector, some of '
    'its names keep only these classes',
  )
  parser.add_argument(
    '--image_size',
    type=flags.height_width,
    help="SIZE or HEIGHT,WIDTH in pixels, to which position embeddings are resized (SRC's)",
  )
  flags.add_weights_flags(parser)
  flags.add_trust_flags(parser)
  return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the flags; ValueError unless exactly one of DST and --push is given."""
  args = make_parser().parse_args(argv)
  if (args.dst is None) == (args.push is None):
    raise ValueError('pass either DST, the place to write, or --push')
  return args


def main(argv: Sequence[str]) -> int:
  """Converts weights; returns the exit status."""
  args = parse(argv)
  console.interrupt_on_signals()
  import jax

  from vit_jax.weights import convert, identify

  class_names = None
  if args.class_names:
    class_names = read_class_names(args.class_names)
  options = dict(
    to=args.to,
    class_names=class_names,
    image_size=args.image_size,
    num_heads=args.num_heads,
    gelu=args.gelu,
    entry=args.entry,
    base=args.base,
  )
  if args.push:
    model, notes = convert.push(args.src, args.push, **options)
  else:
    model, notes = convert.convert(args.src, args.dst, **options)
  count = sum(x.size for x in jax.tree.leaves(model.params))
  size = 'x'.join(map(str, model.image_size or ('any size',)))
  classes = 'no classes'
  if model.num_classes:
    classes = console.pluralize(model.num_classes, 'class')
  console.log(
    f'{args.src}: {identify.describe(model.params)}, {count:,} parameters, '
    f'images of {size}, {classes}'
  )
  for note in notes:
    console.log(f'note: {note}')
  console.log(f'written to {args.push or args.dst}')
  return 0


def read_class_names(path: str) -> list[str]:
  """Reads class names from a JSON list, or from a file with one per line."""
  from vit_jax.configs import schema  # Late, for a fast --help.
  from vit_jax.weights import arrays

  file = epath.Path(path)
  if not file.is_file():
    raise FileNotFoundError(
      f"class_names='{path}' is not a file: pass one with a name per line "
      '(--class_names)'
    )
  with arrays.file_errors(file):
    if path.endswith('.json'):
      names = files.read_json(file)
      if not schema.accepts(names, tuple[str, ...]):
        raise ValueError(f'it holds {names!r:.80} and must hold a list of names')
      return names
    return text_files.lines(files.read(file, files.JSON_LIMIT), file)
