"""The JobSet of a run: a Kubernetes resource that starts a pod on each node, and restarts all of them."""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vitctl.errors import LaunchError
from vitctl.launch.cluster import MAX_RESTARTS, PORT, SAVE_SECONDS, Resources, resume_words

_LONGEST_NAME = 40  # a host name has 63 letters and adds the numbers of job and pod
_WORKERS, _CONTAINER = "workers", "vitctl"
_CACHE, _SECRET = "/var/cache/vitctl", "vitctl"  # mount path; name of the Secret with the user's variables


@dataclass(frozen=True)
class JobSet(Resources):
    """A JobSet, see `jobset_manifest`.

    Args:
        image: container image in which `python -m vitctl` works.
        claim: persistent volume claim and its mount path, "NAME:/PATH"; it holds the run folder.
        memory: per node, such as "900Gi".
    """

    launcher = "--k8s"
    example = "nodes=4,gpus=8,image=registry.org/vitctl:1.0,claim=runs:/runs"
    submits = ("kubectl", "create", "-f")
    file = "jobset.yaml"

    image: str = field(default="", metadata={"pattern": r"[A-Za-z0-9_./:@-]+", "needed": True})
    claim: str = field(default="", metadata={"pattern": r"[a-z0-9.-]+:/[A-Za-z0-9_./-]+"})
    memory: str = field(default="", metadata={"pattern": "[0-9]+(Ki|Mi|Gi|Ti|k|M|G|T)"})
    namespace: str = field(default="", metadata={"pattern": "[a-z0-9-]+"})

    def text(self, run_dir: Path, store: str = "") -> str:
        return str(yaml.safe_dump(jobset_manifest(self, run_dir, store), sort_keys=False, width=110))


def jobset_manifest(job: JobSet, run_dir: Path, store: str = "") -> dict[str, Any]:
    """Return the JobSet, apiVersion jobset.x-k8s.io/v1alpha2, as Kubernetes reads it.

    A deleted pod gets TERM: all processes save and exit with code 3. After that, and after a lost pod or
    process, all pods are restarted, `MAX_RESTARTS` times; exit code 2, an error that the user can fix, ends
    the JobSet.

    Args:
        run_dir: absolute, under the mount path of the claim; without a claim it is on the disk of each node,
            and `store` keeps the run. It names the JobSet; characters that Kubernetes does not allow become
            hyphens.

    Raises LaunchError if the run folder is not on the claim, or there is neither claim nor store.
    """
    claim, _, mount = job.claim.partition(":")
    if not (claim or store):
        raise LaunchError(
            "--k8s",
            "claim is missing",
            "give claim=NAME:/runs for a volume of the run, or --out s3://BUCKET/FOLDER",
        )
    mount, run_dir = (mount, run_dir) if claim else ("/runs", Path("/runs", run_dir.name))
    if not run_dir.is_relative_to(mount):
        raise LaunchError(
            run_dir,
            f"not on the claim {claim}, which pods mount at {mount}",
            "choose a folder there with --out",
        )
    name = re.sub("[^a-z0-9]+", "-", run_dir.name.lower()).lstrip("-0123456789")
    name = name[:_LONGEST_NAME].rstrip("-") or "vitctl"  # a service's name begins with a letter
    words = ["python", *resume_words(run_dir, store)]
    first = f"{name}-{_WORKERS}-0-0.{name}"
    # The address of the first pod does not resolve before that pod is scheduled.
    waits = f"until getent hosts {first} > /dev/null; do sleep 1; done; exec " if job.nodes > 1 else "exec "
    words += ["--nodes", f"{job.nodes}@{first}:{PORT}"] if job.nodes > 1 else []
    limits = {
        "nvidia.com/gpu": job.gpus,
        "cpu": job.cpus * job.tasks_per_node,
        "memory": job.memory,
    }
    container = {
        "name": _CONTAINER,
        "image": job.image,
        # Kubernetes expands $(NAME) in a command, and makes $$ a plain dollar sign.
        "command": ["sh", "-c", (job.setup_text + waits + shlex.join(words)).replace("$", "$$")],
        "env": [{"name": "VITCTL_CACHE", "value": _CACHE}],
        "envFrom": [{"secretRef": {"name": _SECRET, "optional": True}}],
        "resources": {"limits": {key: value for key, value in limits.items() if value}},
        "volumeMounts": [
            {"name": name, "mountPath": path}
            for name, path in (("runs", mount), ("shm", "/dev/shm"), ("cache", _CACHE))
        ],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SAVE_SECONDS,
        "containers": [container],
        "volumes": [
            {
                "name": "runs",
                **({"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}),
            },
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # for batches; the default is 64 MB
            {"name": "cache", "emptyDir": {}},  # on the node's disk, for remote shards and weights
        ],
    }
    ends = {"containerName": _CONTAINER, "operator": "In", "values": [2]}
    workers = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": ends}]},
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, **({"namespace": job.namespace} if job.namespace else {})},
        "spec": {
            "failurePolicy": {
                "maxRestarts": MAX_RESTARTS,
                # Old pods must be gone before new ones start, because they lock the run folder.
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    {"name": "fixable", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
                ],
            },
            "replicatedJobs": [{"name": _WORKERS, "replicas": 1, "template": {"spec": workers}}],
        },
    }
