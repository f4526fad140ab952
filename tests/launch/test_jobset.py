"""The JobSet of a run: a golden file, the fields of its schema, and its command, which a shell runs."""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from vitctl.cli import app
from vitctl.errors import LaunchError, LostProcess
from vitctl.launch.jobset import JobSet, jobset_manifest
from vitctl.system.remote import GaveUpError

GOLDEN = Path(__file__).parents[1] / "golden" / "jobset.yaml"
WORDS = "nodes=4,gpus=8,cpus=12,memory=900Gi,image=registry.org/vitctl:1.0,claim=runs:/runs,namespace=vision"
# The fields of jobset.x-k8s.io/v1alpha2, and of a Job and a Pod in it, that a JobSet here may have, by their
# types: a list of one item says what its items are. Written by hand from the resource definitions.
_TEXT, _COUNT = str, int
_CONTAINER = {
    "name": _TEXT,
    "image": _TEXT,
    "command": [_TEXT],
    "env": [{"name": _TEXT, "value": _TEXT}],
    "envFrom": [{"secretRef": {"name": _TEXT, "optional": bool}}],
    "resources": {"limits": {"nvidia.com/gpu": _COUNT, "cpu": _COUNT, "memory": _TEXT}},
    "volumeMounts": [{"name": _TEXT, "mountPath": _TEXT}],
}
_POD = {
    "restartPolicy": ("Never",),  # a podFailurePolicy needs it
    "terminationGracePeriodSeconds": _COUNT,
    "containers": [_CONTAINER],
    "volumes": [
        {
            "name": _TEXT,
            "persistentVolumeClaim": {"claimName": _TEXT},
            "emptyDir": {"medium": ("Memory",)},
        }
    ],
}
_JOB = {
    "completionMode": ("Indexed",),
    "completions": _COUNT,
    "parallelism": _COUNT,
    "backoffLimit": _COUNT,
    "podFailurePolicy": {
        "rules": [
            {
                "action": ("FailJob", "Ignore", "Count", "FailIndex"),
                "onExitCodes": {"containerName": _TEXT, "operator": ("In", "NotIn"), "values": [_COUNT]},
            }
        ]
    },
    "template": {"spec": _POD},
}
SCHEMA = {
    "apiVersion": ("jobset.x-k8s.io/v1alpha2",),
    "kind": ("JobSet",),
    "metadata": {"name": _TEXT, "namespace": _TEXT},
    "spec": {
        "failurePolicy": {
            "maxRestarts": _COUNT,
            "restartStrategy": ("Recreate", "BlockingRecreate", "InPlaceRestart"),
            "rules": [
                {
                    "name": _TEXT,
                    "action": ("FailJobSet", "RestartJobSet"),
                    "onJobFailureReasons": [("PodFailurePolicy", "BackoffLimitExceeded")],
                }
            ],
        },
        "replicatedJobs": [{"name": _TEXT, "replicas": _COUNT, "template": {"spec": _JOB}}],
    },
}


def check(value: Any, schema: Any, place: str = "") -> None:
    """Fail where a value has a field or a type that the schema does not have."""
    if isinstance(schema, dict):
        assert isinstance(value, dict) and value.keys() <= schema.keys(), place
        for name, part in value.items():
            check(part, schema[name], f"{place}.{name}")
    elif isinstance(schema, list):
        assert isinstance(value, list), place
        for part in value:
            check(part, schema[0], f"{place}[]")
    elif isinstance(schema, tuple):
        assert value in schema, place
    else:
        assert type(value) is schema, place


def command(manifest: dict[str, Any]) -> list[str]:
    [job] = manifest["spec"]["replicatedJobs"]
    [container] = job["template"]["spec"]["template"]["spec"]["containers"]
    return list(container["command"])


def test_manifest__golden() -> None:
    manifest = jobset_manifest(JobSet.parse(WORDS), Path("/runs/jft_h14_20260101-120000"))
    assert manifest == yaml.safe_load(GOLDEN.read_text())
    check(manifest, SCHEMA)


def test_manifest__every_mount_has_its_volume_and_the_cache_is_on_one() -> None:
    manifest = jobset_manifest(JobSet.parse(WORDS), Path("/runs/a"))
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert {"name": "VITCTL_CACHE", "value": mounts["cache"]} in container["env"]


def test_manifest__of_one_node_has_no_rendezvous() -> None:
    manifest = jobset_manifest(JobSet.parse("image=a,claim=b:/mnt/b"), Path("/mnt/b/20260101 Été"))
    check(manifest, SCHEMA)
    assert command(manifest) == ["sh", "-c", "exec python -m vitctl resume '/mnt/b/20260101 Été'"]
    assert manifest["metadata"] == {"name": "t"}
    [job] = manifest["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["template"]["spec"]["containers"][0]["resources"] == {"limits": {}}


def test_write(tmp_path: Path) -> None:
    job = JobSet.parse(f"nodes=2,image=a,claim=b:{tmp_path}")
    (tmp_path / "run").mkdir()  # prepared
    file = job.write(tmp_path / "run")
    assert file == tmp_path / "run" / "jobset.yaml"
    check(yaml.safe_load(file.read_text()), SCHEMA)
    with pytest.raises(LaunchError, match="not on the claim b, which pods mount at /elsewhere; choose"):
        JobSet.parse("image=a,claim=b:/elsewhere").write(tmp_path / "run")


def test_jobset__without_a_claim_keeps_the_run_in_a_store() -> None:
    """Each pod has a disk of its own, and fetches the run from the store."""
    job = JobSet.parse("image=a,nodes=2,gpus=8")
    with pytest.raises(LaunchError, match=r"claim is missing; give claim=NAME:/runs .*, or --out s3://"):
        job.text(Path("/home/me/runs/a"))
    found = yaml.safe_load(job.text(Path("/home/me/runs/a"), "s3://bucket/runs/a"))
    check(found, SCHEMA)
    pod = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    line = pod["containers"][0]["command"][2]
    assert "vitctl resume /runs/a --set checkpoint.store=s3://bucket/runs/a --nodes 2@" in line
    assert pod["volumes"][0] == {"name": "runs", "emptyDir": {}}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("claim=runs:/runs", "image is missing"),
        ("image=a,claim=runs", "'claim=runs' is not a valid claim"),
        ("image=a b,claim=runs:/runs", "'image=a b' is not a valid image"),
        ("image=a,claim=runs:/runs,memory=lots", "'memory=lots' is not a valid memory"),
        ("image=a,claim=runs:/runs,time=1:00", "'time=1:00' is unknown; known: nodes, gpus"),
    ],
)
def test_parse__refuses(text: str, key: str) -> None:
    with pytest.raises(LaunchError, match=f"^--k8s: {key}.*for example --k8s nodes=4"):
        JobSet.parse(text)


_NASTY = st.text(alphabet=st.sampled_from("ab '\"\\$`;&|<>(){}[]*?!#%~=\n\té猫-"), min_size=1, max_size=24)


@settings(max_examples=30, deadline=None)
@given(folder=_NASTY)
def test_command__whatever_the_folder_is_called(folder: str) -> None:
    """The shell waits for the first pod's address, then runs vitctl with the folder, and nothing else."""
    with tempfile.TemporaryDirectory() as where:
        tools, record, run_dir = Path(where) / "bin", Path(where) / "record", Path("/runs") / folder
        manifest = jobset_manifest(JobSet.parse("nodes=2,image=a,claim=b:/runs"), run_dir)
        check(manifest, SCHEMA)
        tools.mkdir()
        for tool in ("getent", "python"):
            (tools / tool).write_text('#!/bin/bash\nprintf "%s\\0" "${0##*/}" "$@" >> "$RECORD"\n')
            (tools / tool).chmod(0o755)
        shell, *words = [word.replace("$$", "$") for word in command(manifest)]
        env = {"PATH": str(tools), "RECORD": str(record)}
        done = subprocess.run([f"/bin/{shell}", *words], env=env, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        first = manifest["metadata"]["name"]
        host = f"{first}-workers-0-0.{first}"
        told = ["getent", "hosts", host, "python", "-m", "vitctl", "resume", str(run_dir)]
        assert record.read_text().split("\0") == [*told, "--nodes", f"2@{host}:29400", ""]


def test_exit_code__is_3_where_a_restart_may_help() -> None:
    """Exit code 2 ends a JobSet; a lost process or pod must not, nor a store that may be back."""
    codes = [app._report_error(error) for error in (LostProcess("a"), GaveUpError("a"), LaunchError("a"))]
    assert codes == [3, 3, 2]
