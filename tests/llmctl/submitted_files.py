"""The record that lets a job start in a handmade run directory, as a submission writes it."""

import hashlib
import json
from pathlib import Path

from llmctl.supervisor.trust import checksums_bytes, checksums_file


def record_contents(run_dir: Path, submission: int = 1) -> None:
    """Record the settings of a run directory as submitted."""
    names = [name for name in ("job.sh", "job.json", "config.yaml") if (run_dir / name).exists()]
    data = checksums_bytes({name: hashlib.sha256((run_dir / name).read_bytes()).hexdigest() for name in names})
    Path(checksums_file(str(run_dir), submission)).write_bytes(data)
    contents = {"number": submission, "contents": hashlib.sha256(data).hexdigest()}
    record = run_dir / "run.json"
    values = json.loads(record.read_text()) if record.exists() else {"run_id": run_dir.name, "submissions": []}
    others = [one for one in values["submissions"] if one["number"] != submission]
    values["submissions"] = [*others, contents]
    record.write_text(json.dumps(values))
    for path in (run_dir, record, *(run_dir / name for name in names)):
        path.chmod(0o700)
