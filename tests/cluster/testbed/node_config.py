"""Configuration of the programs of a node, as the text of their files."""

import json
from collections.abc import Sequence
from ipaddress import IPv4Network
from pathlib import Path

import yaml

from testbed.api import Object
from testbed.images import PAUSE
from testbed.pki import KeyPair
from testbed.processes import output
from testbed.project_images import HostMount

DOMAIN = "cluster.local"
CNI = Path("/usr/lib/cni")


def cni(pods: IPv4Network) -> str:
    """A bridge, and addresses of `pods` on it."""
    plugins = {
        "cniVersion": "0.4.0",
        "name": "testbed",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": True,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": str(pods)}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }
    return json.dumps(plugins)


def container(base: Object, mounts: Sequence[HostMount]) -> str:
    """Container that every container starts from, before its pod has a say: the host's mounts.

    `base`: containerd's example; it is changed.
    """
    # The limit on open files would be that of an example, not this machine's.
    base["process"].pop("rlimits", None)
    base["mounts"] += [
        {
            "type": "bind",
            "source": str(mount.source),
            "destination": str(mount.target),
            "options": ["rbind", "ro"],
        }
        for mount in mounts
    ]
    return json.dumps(base)


def containerd(cni: Path, container_base: Path) -> str:
    """`cni`: the folder with the plugins' configuration; `container_base`: of `container`."""
    return f"""
version = 2
oom_score = 0
[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  # Lowering the score of a sandbox needs a capability that a virtual machine's root may lack.
  restrict_oom_score_adj = true
  enable_selinux = false
  disable_apparmor = true
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{CNI}"
  conf_dir = "{cni}"
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "{_snapshotter(cni)}"
  default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  base_runtime_spec = "{container_base}"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  SystemdCgroup = false
"""


def _snapshotter(folder: Path) -> str:
    """overlayfs, or copies of whole images where the folder is itself on an overlay."""
    below = output(["stat", "-f", "-c", "%T", folder]).strip()
    return "native" if below == "overlayfs" else "overlayfs"


def kubelet(authority: Path, serving: KeyPair, dns: str, cgroup: str) -> str:
    """`authority`: the certificate that may sign users; `serving`: the kubelet's own; `cgroup`: the
    parent of all of its pods."""
    settings: Object = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(authority)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(serving.certificate),
        "tlsPrivateKeyFile": str(serving.key),
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "clusterDNS": [dns],
        "clusterDomain": DOMAIN,
        "resolvConf": "",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        # Refused by default from 1.35 on, and all that some machines have.
        "failCgroupV1": False,
        "failSwapOn": False,
        # The kubelet shares the machine with a whole test run: it must reserve nothing, and
        # must not evict pods when the disk or the memory of that run is full.
        "enforceNodeAllocatable": [],
        "evictionHard": {
            "memory.available": "1Mi",
            "nodefs.available": "0%",
            "nodefs.inodesFree": "0%",
            "imagefs.available": "0%",
        },
        "imageGCHighThresholdPercent": 100,
        "localStorageCapacityIsolation": False,
        # Tests wait for what the kubelet reports.
        "nodeStatusUpdateFrequency": "2s",
        "nodeLeaseDurationSeconds": 8,
        "syncFrequency": "10s",
    }
    return yaml.safe_dump(settings)


def proxy(node: str, kubeconfig: Path, network: IPv4Network) -> str:
    """`network`: of the nodes and their pods."""
    settings: Object = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "hostnameOverride": node,
        "mode": "iptables",
        "clusterCIDR": str(network),
        # These are settings of the whole machine, which only its first namespace may change.
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
    }
    return yaml.safe_dump(settings)
