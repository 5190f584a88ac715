"""Changes the files of stored runs."""

import json


def change_config(workdir, **values):
  """Changes keys in the config.json of a run, and accepts the change."""
  change_json(workdir / 'config.json', lambda plain: plain.update(values))
  change_json(workdir / 'data.json', lambda data: data.pop('config'))


def change_json(path, change):
  """Changes the content of a JSON file by a function."""
  content = json.loads(path.read_text())
  change(content)
  path.write_text(json.dumps(content))
