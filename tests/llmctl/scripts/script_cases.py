"""Job scripts under test: every bundled profile and launcher of its scheduler, with and without an image."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from llmctl.backends import load_backend
from llmctl.backends.base import JobRequest
from llmctl.paths import BUNDLED, PACKAGE, UserFolders
from llmctl.site.container import plan_container
from llmctl.site.job import JobSpec
from llmctl.site.profile import ClusterProfile, EnvironmentProfile, load_profile
from llmctl.submit.decide import build_request
from llmctl.submit.job import Job, RenderedJob
from llmctl.submit.render import render
from tests.llmctl.submitted_files import record_contents

FOLDERS = UserFolders(home=Path("/home/ada"), config=Path("/none"), state=Path("/none"))
RUN_ID = "gpt-261121-101500-ab12"
IMAGE = "nvcr.io#nvidia/pytorch:25.09-py3"
CLUSTERS = tuple(sorted(path.stem for path in (BUNDLED / "clusters").glob("*.yaml") if path.stem != "local"))


@dataclass(frozen=True)
class ScriptCase:
    """One script: a profile, a launcher, and with or without an image."""

    cluster: str
    launcher: str
    in_container: bool

    def __str__(self) -> str:
        return f"{self.cluster}__{self.launcher}{'_in_image' if self.in_container else ''}"

    def profile(self) -> ClusterProfile:
        profile = load_profile(FOLDERS, self.cluster)
        given = {"runs_root": "/runs", "group": profile.group or ("gaa50000" if profile.group_required else None)}
        if profile.scheduler == "ssh":
            given["hosts"] = ("node1", "node2")
        return profile.model_copy(update=given)

    def rendered(self, **changes: object) -> RenderedJob:
        job = JobSpec(
            name="gpt",
            nodes=2,
            time_s=7200,
            launcher=self.launcher,
            container=IMAGE if self.in_container else None,
            secrets=("TOKEN",),
        )
        return render_case(self.profile(), replace(job, **changes))


def render_case(
    profile: ClusterProfile,
    spec: JobSpec,
    *,
    ranks_per_node: int | None = None,
    **changes: object,
) -> RenderedJob:
    """Render the script of a job, decided as a submission does."""
    resource = profile.resource_types.get(profile.defaults.resource_type or "")
    ranks = ranks_per_node or (resource.gpus if resource is not None and resource.gpus else 4)
    place = f"{profile.runs_root}/{RUN_ID}"
    container = plan_container(spec, profile, cwd="/", own_mounts=(place,))
    sized = replace(spec, gpus_per_node=ranks)
    request = build_request(
        sized, profile, load_backend(profile.scheduler), name=RUN_ID, run_dir=place, container=container
    )
    return render(job_of(spec, request, **{"python": "/home/ada/venv/bin/python", **changes}))


def job_of(spec: JobSpec, request: JobRequest, **changes: object) -> Job:
    """A decided job with this request."""
    secrets = Path(f"{request.run_dir}/own/secrets/{RUN_ID}.1") if spec.secrets else None
    job = Job(
        spec=spec,
        request=request,
        backend=load_backend(request.profile.scheduler),
        folders=FOLDERS,
        is_remote=False,
        working_dir=Path("/home/ada/work"),
        secrets_file=secrets,
    )
    return replace(job, **changes)


def install(rendered: RenderedJob, run_dir: Path) -> Path:
    """Write job.sh and the files beside it, as a submission does."""
    (run_dir / "code").mkdir(parents=True, exist_ok=True)
    (run_dir / "job.json").write_text(rendered.settings)
    (run_dir / "job.sh").write_bytes(rendered.script.encode("utf-8", "surrogateescape"))
    shutil.copytree(PACKAGE / "supervisor", run_dir / "code" / "supervisor", copy_function=shutil.copyfile)
    record_contents(run_dir)
    return run_dir / "job.sh"


def cases() -> list[ScriptCase]:
    found = []
    for cluster in CLUSTERS:
        profile = load_profile(FOLDERS, cluster)
        for launcher in load_backend(profile.scheduler).launchers:
            found.append(ScriptCase(cluster, launcher, in_container=False))
            # mpirun's daemons would be outside the container of pyxis: that is refused.
            if profile.container.runtime is not None and (profile.container.runtime, launcher) != ("pyxis", "mpirun"):
                found.append(ScriptCase(cluster, launcher, in_container=True))
    return found


CASES = cases()


def with_everything(profile: ClusterProfile, nasty: str) -> ClusterProfile:
    """A profile whose environment is hard to quote."""
    software = EnvironmentProfile(modules=("cuda/12.8", nasty), setup=("ulimit -n 65536",), kind="venv", path=nasty)
    return profile.model_copy(update={"environment": software})
