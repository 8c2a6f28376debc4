"""Installs PipeMorph on a cluster and runs a job until it has adapted: `make kind`.

Without `--kubeconfig` the cluster is one of kind on this machine, which is created if it is absent.
Every step has a deadline, and prints its command first. A repeated call goes on with what is there.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pipemorph import __version__
from pipemorph.client import ClusterBackend, JobClient
from pipemorph.errors import InputError, PipeMorphError

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "examples/kubernetes/one-link.yaml"
CLUSTER, NAMESPACE, SYSTEM = "pipemorph", "default", "pipemorph-system"
CPU_TORCH = "https://download.pytorch.org/whl/cpu"
KIND_SECONDS, BUILD_SECONDS, INSTALL_SECONDS, JOB_SECONDS = 600, 3600, 300, 600
HELP = {
    "kubectl": "https://kubernetes.io/docs/tasks/tools",
    "helm": "https://helm.sh/docs/intro/install",
    "kind": "https://kind.sigs.k8s.io, or give --kubeconfig FILE of a cluster",
    "docker": "https://docs.docker.com/engine/install, or give --engine podman",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kubeconfig", metavar="FILE", help="cluster (default: one of kind)")
    parser.add_argument("--registry", help="push images there, such as registry.example/team")
    parser.add_argument("--engine", default="docker", help="builds images (default: docker)")
    parser.add_argument(
        "--loaded", action="store_true", help="the nodes have both images: build none"
    )
    options = parser.parse_args()
    try:
        run_first_job(options)
    except PipeMorphError as error:
        print(f"first_job: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


def run_first_job(options: argparse.Namespace) -> None:
    if options.kubeconfig and not (options.registry or options.loaded):
        raise InputError(
            "--kubeconfig: needs --registry NAME, where the nodes can pull images, or --loaded if"
            " they have them"
        )
    require_programs(options)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        kubeconfig = options.kubeconfig or create_kind_cluster(Path(folder))
        os.environ["KUBECONFIG"] = str(Path(kubeconfig).absolute())
        prefix = f"{options.registry or 'pipemorph'}/"
        if not options.loaded:
            deliver_images(options, prefix)
        install_chart(prefix)
        sentence = run_job(JobClient(ClusterBackend(namespace=NAMESPACE)))
    print(f"one-link has adapted, {time.monotonic() - began:.0f} s after the start: {sentence}")


def require_programs(options: argparse.Namespace) -> None:
    needed = ["kubectl", "helm"]
    needed += [] if options.kubeconfig else ["kind"]
    needed += [] if options.loaded else [options.engine]
    for program in needed:
        if shutil.which(program) is None:
            where = HELP.get(program, "or choose another --engine")
            raise InputError(f"{program} is not on PATH; install it: {where}")


def create_kind_cluster(folder: Path) -> Path:
    """Create kind's cluster if it is absent; returns its kubeconfig."""
    if CLUSTER not in run("kind", "get", "clusters", seconds=60).split():
        run("kind", "create", "cluster", "--name", CLUSTER, "--wait", "120s", seconds=KIND_SECONDS)
    path = folder / "kubeconfig"
    path.touch(mode=0o600)
    path.write_text(run("kind", "get", "kubeconfig", "--name", CLUSTER, seconds=60))
    return path


def deliver_images(options: argparse.Namespace, prefix: str) -> None:
    """Build both images, with torch for CPUs, and bring them to the nodes."""
    images = {target: f"{prefix}{target}:{__version__}" for target in ("operator", "trainer")}
    for target, image in images.items():
        build = [options.engine, "build", "--target", target, "--tag", image]
        build += ["--build-arg", f"TORCH_INDEX={CPU_TORCH}", str(ROOT)]
        run(*build, seconds=BUILD_SECONDS)
        if options.registry:
            run(options.engine, "push", image, seconds=BUILD_SECONDS)
    if not options.kubeconfig and not options.registry:
        load = ["kind", "load", "docker-image", *images.values(), "--name", CLUSTER]
        run(*load, seconds=KIND_SECONDS)


def install_chart(prefix: str) -> None:
    chart = str(ROOT / "charts/pipemorph-operator")
    command = ["helm", "upgrade", "--install", "pipemorph", chart, "--namespace", SYSTEM]
    command += ["--create-namespace", "--set", f"image.repository={prefix}operator"]
    command += ["--set", f"trainer.image={prefix}trainer:{__version__}"]
    run(*command, "--wait", f"--timeout={INSTALL_SECONDS}s", seconds=INSTALL_SECONDS + 60)


def run_job(client: JobClient) -> str:
    """Run the job until its plan has changed; returns the sentence of its status."""
    if f"{NAMESPACE}/one-link" in [job.name for job in client.list_jobs()]:
        client.delete_job("one-link")
    name = client.submit_job(JOB)
    print(f"{name}: submitted; waiting up to {JOB_SECONDS} s until it adapts", flush=True)
    job = client.wait_for_job_status(name, {"ScheduleAdapted"}, timeout=JOB_SECONDS)
    print(job.explain())
    return job.conditions["ScheduleAdapted"].message


def run(*command: str, seconds: float) -> str:
    """Output of a command. Raises :class:`InputError` with its last line, if it fails or takes
    longer."""
    print(f"$ {shlex.join(command)}", flush=True)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
            timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise InputError(f"{command[0]} took longer than {seconds:g} s: {command}") from None
    except OSError as error:
        raise InputError(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        raise InputError(f"{command[0]} exited with {done.returncode}; its error is above")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
