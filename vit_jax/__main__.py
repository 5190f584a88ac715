"""The command `vit_jax`, also `python -m vit_jax`: dispatches to a command."""

from collections.abc import Iterator, Sequence
import contextlib
import difflib
import importlib
import os
import pathlib
import signal
import sys
import traceback

import vit_jax

# Name of a command, a module in vit_jax/commands -> what it does.
COMMANDS = {
  'train': 'Train or fine-tune a model, or run a study',
  'evaluate': 'Evaluate a trained model on any split',
  'predict': 'Print, draw or tabulate predictions for images',
  'visualize': "Draw the paper's figures for a model",
  'demo': 'Serve a web demo for your photos',
  'probe': 'Measure features by few-shot, linear and nearest-neighbour probes',
  'convert': 'Convert weights to and from timm, Hugging Face, ...',
  'export': 'Export a model to ONNX, StableHLO or SavedModel',
  'index': 'List and check the images of a folder before training',
  'plan': 'Estimate memory, speed and cost of training on TPUs',
  'sweep': 'Choose a learning rate or other values, then test it',
}
# Errors that are shown in one line if this package raises them.
_EXPECTED = (ValueError, FloatingPointError, OSError, ImportError)


def help_text() -> str:
  """Returns what `vit_jax --help` prints."""
  width = max(map(len, COMMANDS))
  lines = [f'  {name:<{width}}  {does}' for name, does in COMMANDS.items()]
  return '\n'.join(
    [
      'usage: vit_jax COMMAND ...\n',
      *lines,
      '\nRun `vit_jax COMMAND --help` for the flags of a command, '
      '`vit_jax --version` for the version.',
    ]
  )


@contextlib.contextmanager
def _interrupts_end_process() -> Iterator[None]:
  """Lets Ctrl-C end the process, since imports may swallow a KeyboardInterrupt."""
  handler = signal.getsignal(signal.SIGINT)
  if handler is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, handler)


def run(command: str, argv: Sequence[str] | None = None) -> None:
  """Runs a module of vit_jax/commands and exits with the status it returns.

  Errors raised by this package (a wrong flag, a missing folder) are printed in one
  line, all others with a traceback. `argv` defaults to the process's arguments.
  """
  with _interrupts_end_process():
    from vit_jax import console

    console.use_huge_pages()
  console.prepare_streams()
  console.quiet()
  console.avoid_absent_gpus(quiet=command == 'plan')  # It needs no device.
  console.keep_compiled()
  try:
    with _interrupts_end_process():
      module = importlib.import_module(f'vit_jax.commands.{command}')
    status = module.main(sys.argv[1:] if argv is None else argv)
    sys.stdout.flush()
    sys.exit(status)
  except BrokenPipeError:  # The reader, such as `head`, has closed the pipe.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)  # 128 + SIGPIPE.
  except KeyboardInterrupt as e:
    console.log_error(str(e) or 'Interrupted.')
    heartbeats = sys.modules.get('vit_jax.distributed.heartbeats')
    if not (
      heartbeats and heartbeats.watch.failed
    ):  # Else it leaves when Python exits.
      console.exit_at_once(130)
    sys.exit(130)
  except Exception as e:
    frame = traceback.extract_tb(e.__traceback__)[-1]
    source = pathlib.Path(frame.filename)
    ours = {'vit_jax', 'configs'} & set(source.parts[-4:-1])
    if isinstance(e, ModuleNotFoundError) and e.name in console.TRAIN_MODULES:
      reason = console.install(e.name, 'train', f'vit_jax {command}')
    elif isinstance(e, _EXPECTED) and ours:
      reason = f'{e}'
    elif (source.name, frame.name) == ('xla_bridge.py', 'backends'):
      reason = _no_device(e)
    else:
      raise
    console.log_error(f'Error: {reason}')
    sys.exit(1)


def _no_device(error: Exception) -> str:
  platforms = sys.modules['jax'].config.jax_platforms
  lines = str(error).splitlines()
  cause = f' ({lines[0]})' if lines else ''
  return (
    f'JAX_PLATFORMS={platforms}: JAX finds no such device on this machine{cause}: '
    'install JAX for it, or unset JAX_PLATFORMS'
  )


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the command named by the first argument and exits with its status.

  `argv` defaults to the arguments of the process.
  """
  name, *arguments = (sys.argv[1:] if argv is None else argv) or ('',)
  if name in COMMANDS:
    run(name, arguments)
  from vit_jax import console

  if name in ('-h', '--help', 'help'):
    console.log(help_text())
    sys.exit(0)
  if name == '--version':
    console.log(f'vit_jax {vit_jax.__version__}')
    sys.exit(0)
  near = difflib.get_close_matches(name, COMMANDS, n=1)
  hint = f": did you mean '{near[0]}'?" if near else ''
  message = f"Error: there is no command '{name}'{hint}" if name else ''
  console.log_error(f'{message}\n{help_text()}'.strip())
  sys.exit(1)


if __name__ == '__main__':
  main()
