"""The command `vit_jax`, also `python -m vit_jax`: trains, looks in, converts."""

from collections.abc import Sequence
import difflib
import sys

from vit_jax import console

# Name of a command, a module in vit_jax/commands -> what it does.
COMMANDS = {
  'train': 'trains a model, or runs another program of a config',
  'evaluate': 'evaluates a trained model on any split',
  'predict': 'prints or draws what a model says of images',
  'visualize': "draws the paper's figures of a model",
  'demo': 'shows a model on a page, for photographs that you drop',
  'probe': 'measures the features of a model by linear probes',
  'convert': 'converts weights to and from timm, Hugging Face, ...',
  'export': 'writes a model as StableHLO, SavedModel or ONNX',
  'index': 'lists and checks the images of a folder before training',
  'plan': 'plans a training for TPUs: memory, speed, cost',
  'sweep': 'chooses a learning rate or other values, and tests it',
  'compute': 'counts FLOPs and cost of pre-training',
}


def help_text() -> str:
  """Returns what `vit_jax --help` prints."""
  width = max(map(len, COMMANDS))
  lines = [f'  {name:<{width}}  {does}' for name, does in COMMANDS.items()]
  return '\n'.join(
    [
      'usage: vit_jax COMMAND ...\n',
      *lines,
      '\nvit_jax COMMAND --help describes a command and its flags.',
    ]
  )


def main(argv: Sequence[str] | None = None):
  """Runs a command, and exits with its status.

  Args:
    argv: name of the command and its arguments; by default those of the process.
  """
  name, *rest = (sys.argv[1:] if argv is None else argv) or ('',)
  if name in COMMANDS:
    console.run(name, rest)
  if name in ('-h', '--help', 'help'):
    print(help_text())
    sys.exit(0)
  near = difflib.get_close_matches(name, COMMANDS, n=1)
  hint = f": did you mean '{near[0]}'?" if near else ''
  said = f"Error: there is no command '{name}'{hint}" if name else ''
  print(f'{said}\n{help_text()}'.strip(), file=sys.stderr)
  sys.exit(1)


if __name__ == '__main__':
  main()
