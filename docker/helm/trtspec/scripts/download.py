# Fetches checkpoints into the hub cache at HF_HOME and inspects them. Then writes the file that
# says that they are whole. Arguments: that file, then hub ids, org/name or org/name@COMMIT, or
# directories, which must be there already.
import pathlib
import subprocess
import sys

from huggingface_hub import snapshot_download

done, *names = sys.argv[1:]
if pathlib.Path(done).exists():
    print(f"{done}: fetched before")
    sys.exit(0)
for name in names:
    if not name.startswith("/"):
        repository, _, revision = name.partition("@")
        print(snapshot_download(repository, revision=revision or None), flush=True)
    status = subprocess.run(["trtspec", "inspect", name], check=False).returncode
    if status:
        sys.exit(f"{name} was fetched and has the problems above; nothing is served from it")
pathlib.Path(done).parent.mkdir(parents=True, exist_ok=True)
pathlib.Path(done).touch()
