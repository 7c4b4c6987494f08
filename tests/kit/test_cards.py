"""A machine with an NVIDIA card: what its driver and nvidia-smi say is planted, because this one may have none."""

import pytest
import torch

from grpo_tasks.kit import cards
from grpo_tasks.kit.cards import Cards, cards_here, check_cards, fastest_dtype
from schemas.errors import ModelError

OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 13.3.0\n"
MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12.2.0\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that plants the folder of the driver, the devices and what nvidia-smi prints; torch sees no card."""
    monkeypatch.setattr(cards, "DRIVER", tmp_path / "driver")
    monkeypatch.setattr(cards, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev").mkdir()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def plant(version="", listed=0, devices=0, smi=None, status=0):
        if version:
            (tmp_path / "driver" / "gpus").mkdir(parents=True)
            (tmp_path / "driver" / "version").write_text(version)
        for number in range(listed):
            (tmp_path / "driver" / "gpus" / f"0000:{number:02}:00.0").mkdir()
        for number in range(devices):
            (tmp_path / "dev" / f"nvidia{number}").touch()
        if smi is not None:
            (tmp_path / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\necho '{smi}'\nexit {status}\n")
            (tmp_path / "bin" / "nvidia-smi").chmod(0o755)

    return plant


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ({}, Cards(0, "")),
        ({"version": MODULE, "listed": 2, "devices": 2}, Cards(2, "535.104.05")),
        ({"version": OPEN_MODULE, "listed": 1, "devices": 1}, Cards(1, "580.65.06")),
        # A container that was given no card has the folder of its host.
        ({"version": MODULE, "listed": 2}, Cards(0, "")),
        # WSL2, and a machine whose devices appear when somebody first asks for them.
        ({"smi": "537.58\n537.58"}, Cards(2, "537.58")),
        ({"version": MODULE, "listed": 1, "smi": "535.104.05"}, Cards(1, "535.104.05")),
        ({"smi": "No devices were found", "status": 6}, Cards(0, "")),
    ],
    ids=["none", "driver", "open driver", "container", "WSL2", "no devices yet", "nvidia-smi fails"],
)
def test_cards_are_found_by_the_driver_or_by_nvidia_smi(machine, planted, found):
    machine(**planted)
    assert cards_here() == found


@pytest.mark.parametrize(
    ("driver", "cuda", "fix"),
    [
        ("535.104.05", "13.0", "install driver 580 or newer"),
        ("470.82", "12.6", "install driver 525 or newer"),
        ("580.65.06", None, "install torch for CUDA"),
        ("580.65.06", "13.0", "start the machine again after an update of its driver"),
    ],
)
def test_a_card_that_torch_cannot_use_is_an_error(machine, monkeypatch, driver, cuda, fix):
    machine(smi=driver)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ModelError) as refused:
        check_cards()
    assert f"the driver is {driver}" in refused.value.message
    assert ("CPUs only" if cuda is None else f"CUDA {cuda}") in refused.value.message
    assert refused.value.fix.startswith(fix)
    assert "resources.device: cpu" in refused.value.fix


CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
"""What torch 2.13 of the index is built for."""


@pytest.fixture
def usable(monkeypatch):
    """A function that plants cards of some compute capabilities, which torch sees, and what torch is built for."""

    def plant(architectures, *capabilities):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: architectures)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Card")

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return plant


@pytest.mark.parametrize(
    ("capability", "architectures", "fix"),
    [
        ((7, 0), CUDA_13, "install torch for an older version of CUDA"),
        ((6, 1), CUDA_13, "install torch for an older version of CUDA"),
        # Code of one major version does not run on the next one, unless the driver may compile it.
        ((10, 0), ["sm_80", "sm_90a"], "install a newer torch"),
        ((8, 0), ["sm_86"], "install torch for an older version of CUDA"),
    ],
)
def test_a_card_that_torch_is_not_built_for_is_an_error(usable, capability, architectures, fix):
    usable(architectures, capability)
    with pytest.raises(ModelError) as refused:
        check_cards(place="chat", without="an empty CUDA_VISIBLE_DEVICES")
    numbers = ".".join(map(str, capability))
    assert f"a GPU that torch cannot use: NVIDIA Card has compute capability {numbers}, torch" in refused.value.message
    assert refused.value.message.endswith(f"is built for {', '.join(architectures)}")
    assert refused.value.fix.startswith(fix)
    assert refused.value.fix.endswith("; an empty CUDA_VISIBLE_DEVICES computes without a GPU")


@pytest.mark.parametrize(
    ("capability", "architectures"),
    [((7, 5), CUDA_13), ((8, 9), CUDA_13), ((9, 0), ["sm_80", "sm_90a"]), ((12, 1), CUDA_13), ((10, 3), ["sm_90", "compute_90"])],
)
def test_a_card_runs_code_of_its_major_version_and_intermediate_code(usable, capability, architectures):
    usable(architectures, capability)
    check_cards()


def test_each_process_asks_for_its_own_card(usable, monkeypatch):
    usable(CUDA_13, (9, 0), (6, 1))
    check_cards()
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ModelError, match=r"compute capability 6\.1"):
        check_cards()


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_hidden_cards_are_no_error(machine, monkeypatch, hidden):
    machine(smi="535.104.05")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    check_cards()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ModelError):
        check_cards()


def test_no_error_without_cards_or_with_a_usable_one(machine, monkeypatch):
    check_cards()
    machine(smi="580.65.06")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_cards()


@pytest.mark.parametrize(
    ("capabilities", "wanted"),
    [
        ("9.0", "bfloat16"),
        ("8.9", "bfloat16"),
        ("12.0", "bfloat16"),
        ("7.5", "float32"),
        ("9.0\n7.0", "float32"),
        (None, "bfloat16"),
    ],
)
def test_cards_multiply_in_bfloat16_since_capability_8(machine, monkeypatch, tmp_path, capabilities, wanted):
    monkeypatch.setattr(cards, "PROCESSORS", tmp_path / "none")
    machine(version=MODULE, listed=1, devices=1, smi=capabilities)
    assert fastest_dtype("auto") == fastest_dtype("cuda") == wanted
    assert fastest_dtype("cpu") == "float32"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert fastest_dtype("auto") == "float32"


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [("avx512_bf16 amx_bf16 amx_tile", "bfloat16"), ("avx512f avx512_bf16", "bfloat16"), ("avx2 avx512f", "float32")],
)
def test_cpus_multiply_in_bfloat16_with_instructions_for_it(machine, monkeypatch, tmp_path, flags, wanted):
    monkeypatch.setattr(cards, "PROCESSORS", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu sse2 {flags} rdpid\n")
    machine()
    assert fastest_dtype("auto") == fastest_dtype("cpu") == wanted
