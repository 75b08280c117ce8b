"""Environment variables of deployments that contradict each other, or the machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdinfer.diagnosis.doctor import doctor
from pdinfer.diagnosis.report import Level
from pdinfer.diagnosis.variables import VARIABLES
from tests.unit.diagnosis.machines import laptop, server

FAILS, SLOW = Level.FAILURE, Level.WARNING
DEPLOYMENT = {
    "NCCL_IB_HCA": "mlx5_0,mlx5_1",
    "NCCL_IB_GID_INDEX": "3",
    "NCCL_SOCKET_IFNAME": "eth0",
    "GLOO_SOCKET_IFNAME": "eth0",
    "NCCL_IB_TC": "136",
    "NCCL_IB_SL": "5",
    "NCCL_IB_QPS_PER_CONNECTION": "8",
    "NCCL_IB_SPLIT_DATA_ON_QPS": "1",
    "NCCL_MIN_NCHANNELS": "4",
    "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1",
    "NVSHMEM_HCA_LIST": "mlx5_0:1,mlx5_1:1",
    "NVSHMEM_IB_GID_INDEX": "3",
    "MC_TE_METRIC": "true",
}
"""All that a deployment on H800 sets, or suggests."""


def found(root: Path, **environment: str) -> list[tuple[Level, str, str]]:
    sections = {section.name: section for section in doctor(server(root, environment=environment)).sections}
    return [(problem.level, problem.sentence, problem.mend) for problem in sections["variables"].problems]


def test_the_variables_of_a_deployment_fit_a_machine_with_its_devices(tmp_path: Path) -> None:
    assert DEPLOYMENT.keys() < VARIABLES.keys()
    assert found(tmp_path, **DEPLOYMENT) == []


def test_set_and_unset_are_told(tmp_path: Path) -> None:
    (variables,) = [
        s for s in doctor(laptop(tmp_path, environment={"NCCL_IB_TC": "136"})).sections if s.name == "variables"
    ]
    assert {fact.name: fact.value for fact in variables.facts} == dict.fromkeys(VARIABLES, "unset") | {
        "NCCL_IB_TC": "136"
    }
    assert variables.problems == ()


@pytest.mark.parametrize("names", ["eth", "=eth0", "^docker", "^=lo", "eth0,ib0", "e"])
def test_what_nccl_takes_for_an_interface_is_fine(tmp_path: Path, names: str) -> None:
    assert found(tmp_path, NCCL_SOCKET_IFNAME=names) == []


@pytest.mark.parametrize(
    ("environment", "level", "sentence", "mend"),
    [
        (
            {"NCCL_SOCKET_IFNAME": "ibp"},
            FAILS,
            "NCCL_SOCKET_IFNAME=ibp fits no interface; there are eth0, lo",
            "unset NCCL_SOCKET",
        ),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, FAILS, "=eth fits no interface", "unset NCCL_SOCKET_IFNAME"),
        (
            {"GLOO_SOCKET_IFNAME": "eth0,eth7"},
            FAILS,
            "there is no interface eth7; there are",
            "unset GLOO_SOCKET_IFNAME",
        ),
        (
            {"GLOO_SOCKET_IFNAME": "^lo"},
            FAILS,
            "Gloo takes plain names, not NCCL's patterns",
            "unset GLOO_SOCKET_IFNAME",
        ),
        ({"NCCL_IB_HCA": "mlx4_0"}, SLOW, "NCCL_IB_HCA=mlx4_0 fits no RDMA device here .*sockets", "unset NCCL_IB_HCA"),
        ({"NCCL_IB_HCA": "mlx5_0,mlx5_9"}, SLOW, "NCCL_IB_HCA names mlx5_9", "export NCCL_IB_HCA=mlx5_0,mlx5_1"),
        (
            {"NCCL_IB_GID_INDEX": "0", "NCCL_IB_HCA": "mlx5_1"},
            FAILS,
            "NCCL_IB_GID_INDEX=0 is not an address of mlx5_1",
            "unset NCCL_IB_GID",
        ),
        (
            {"NVSHMEM_IB_GID_INDEX": "7", "NVSHMEM_HCA_LIST": "mlx5_0:1", "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1"},
            FAILS,
            "NVSHMEM_IB_GID_INDEX=7 is not an address of mlx5_0",
            "unset NVSHMEM_IB_GID_INDEX",
        ),
        ({"NCCL_IB_DISABLE": "1", "NCCL_IB_TC": "136"}, SLOW, "makes NCCL ignore NCCL_IB_TC", "unset NCCL_IB_DISABLE"),
        (
            {"NVSHMEM_HCA_LIST": "mlx5_0:1"},
            SLOW,
            "counts only with NVSHMEM_ENABLE_NIC_PE_MAPPING=1",
            "export NVSHMEM_ENABLE",
        ),
        (
            {"NVSHMEM_HCA_LIST": "mlx5_5", "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1"},
            SLOW,
            "NVSHMEM_HCA_LIST names mlx5_5",
            "export NVSHMEM_HCA",
        ),
        (
            {
                "NVSHMEM_HCA_LIST": "mlx5_0",
                "NVSHMEM_HCA_PE_MAPPING": "mlx5_0:1:1",
                "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1",
            },
            SLOW,
            "are both set",
            "unset NVSHMEM_HCA_LIST",
        ),
        (
            {"NVSHMEM_HCA_LIST": "mlx5_0", "NCCL_IB_HCA": "mlx5_0,mlx5_1", "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1"},
            SLOW,
            "only one of them has mlx5_1",
            "export NVSHMEM_HCA_LIST=mlx5_0:1,mlx5_1:1",
        ),
        ({"NCCL_IB_SPLIT_DATA_ON_QPS": "1"}, SLOW, "does nothing with one queue pair", "export NCCL_IB_QPS"),
        (
            {"NCCL_MIN_NCHANNELS": "8", "NCCL_MAX_NCHANNELS": "4"},
            SLOW,
            "=8 is more than NCCL_MAX_NCHANNELS=4",
            "unset NCCL_MAX",
        ),
        ({"NCCL_IB_SL": "five"}, SLOW, "NCCL_IB_SL=five is not a number from 0 to 15", "unset NCCL_IB_SL"),
        ({"NCCL_IB_TC": "256"}, SLOW, "NCCL_IB_TC=256 is not a number from 0 to 255", "unset NCCL_IB_TC"),
        ({"MC_TCP_PROTO": "1"}, FAILS, "MooncakeTransport refuses it", "unset MC_TCP_PROTO"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "backend:native,expandable_segments:True"},
            SLOW,
            "memory of expandable_segments cannot be written by a NIC, so .*gpu_direct=True",
            "unset PYTORCH_CUDA_ALLOC_CONF",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            SLOW,
            "PYTORCH_ALLOC_CONF=expandable_segments:True: the memory",
            "unset PYTORCH_ALLOC_CONF",
        ),
        (
            {"MC_IB_PCI_RELAXED_ORDERING": "1"},
            SLOW,
            "writes may be reordered by a NIC, so MooncakeTransport",
            "unset MC_IB_PCI_RELAXED_ORDERING",
        ),
        ({"MC_FORCE_TCP": "1"}, SLOW, "MC_FORCE_TCP is set on a machine with RDMA devices", "unset MC_FORCE_TCP"),
    ],
)
def test_a_contradiction_is_found_and_only_that(
    tmp_path: Path, environment: dict[str, str], level: Level, sentence: str, mend: str
) -> None:
    ((of_level, told, command),) = found(tmp_path, **environment)
    assert of_level is level
    assert re.search(sentence, told)
    assert command.startswith(mend)


def test_addresses_that_differ_are_told(tmp_path: Path) -> None:
    told = found(tmp_path, NCCL_IB_GID_INDEX="3", NVSHMEM_IB_GID_INDEX="1")
    assert [level for level, _, _ in told] == [FAILS, FAILS, SLOW]  # 1 is no address of either card
    assert told[-1][2] == "export NVSHMEM_IB_GID_INDEX=3"


def test_settings_that_hinder_no_nic_are_fine(tmp_path: Path) -> None:
    assert found(tmp_path / "off", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False") == []
    assert found(tmp_path / "set", MC_IB_PCI_RELAXED_ORDERING="0") == []
    machine = laptop(tmp_path / "laptop", environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert not doctor(machine).warnings
