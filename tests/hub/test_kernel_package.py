"""The scan as a package for the library `kernels`: every build variant alone, and loaded by the library."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_program import in_float64, inputs, largest_error, load, results

from hf_recurrent.hub.kernel_package import NAME, write_kernel_package
from hf_recurrent.modeling.scan.linear_scan import available_backends

PROGRAM = Path(__file__).with_name("kernel_program.py")
HAS_KERNEL = "cpu" in available_backends()


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kernel") / NAME
    write_kernel_package(directory)
    return directory


def variant_folders(package):
    return {folder.name: folder for folder in (package / "build").iterdir()}


def test_variants_have_metadata_and_names_of_their_own(package):
    folders = variant_folders(package)
    metadata = {name: json.loads((folder / "metadata.json").read_text()) for name, folder in folders.items()}
    assert {"torch-cpu", "torch-cuda"} < set(folders) if HAS_KERNEL else {"torch-cpu", "torch-cuda"} == set(folders)
    assert len({values["id"] for values in metadata.values()}) == len(folders)
    assert metadata["torch-cuda"]["backend"] == {"type": "cuda"}
    assert all(f"`{name}`" in (package / "README.md").read_text() for name in folders)


def test_sources_name_neither_our_package_nor_its_operators(package):
    for path in package.rglob("*.py"):
        lines = [line for line in path.read_text().splitlines() if "hf_recurrent" in line]
        assert all(line.startswith("Gathered from") for line in lines), (path, lines)
        assert "OPERATORS" not in path.read_text()


@pytest.mark.parametrize(
    "backend", ["torch", pytest.param("cpu", marks=pytest.mark.skipif(not HAS_KERNEL, reason=""))]
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-6), (torch.bfloat16, 0.05)])
def test_a_variant_for_cpus_equals_the_recurrence_in_float64(package, backend, dtype, bound):
    folders = variant_folders(package)
    name = next(name for name in folders if name.startswith("torch-stable")) if backend == "cpu" else "torch-cpu"
    kernel = load(folders[name])
    assert backend in kernel.available_backends()
    assert 0 < largest_error(kernel.linear_scan, dtype, backend=backend) < bound
    layer = kernel.layers.LinearScan()
    assert 0 < largest_error(layer, dtype) < bound


def test_a_variant_without_the_kernel_says_what_is_missing(package):
    kernel = load(variant_folders(package)["torch-cpu"])
    with pytest.raises(ImportError, match="build variant of this platform"):
        kernel.linear_scan(torch.ones(1, 2, 3), torch.ones(1, 2, 3), backend="cpu")


@pytest.mark.long
def test_the_variant_for_gpus_in_the_interpreter_of_triton(package):
    pytest.importorskip("triton")
    command = [sys.executable, str(PROGRAM), str(variant_folders(package)["torch-cuda"]), "triton"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    found = json.loads(printed)
    assert 0 < found["error"] < 5e-6
    assert found["imported"] is False


@pytest.mark.long
def test_compiled_layers_have_one_graph(package):
    kernel = load(variant_folders(package)["torch-cpu"])
    layer = torch.compile(kernel.layers.LinearScan(), backend="aot_eager", fullgraph=True)
    assert largest_error(layer) < 5e-6


def test_the_selective_scan_has_the_results_of_transformers(package):
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    kernel = load(variant_folders(package)["torch-cpu"])
    generator = torch.Generator().manual_seed(2)
    batch, channels, steps, states = 2, 3, 7, 4
    x, z, dt = torch.randn(3, batch, channels, steps, generator=generator).double()
    b, c = torch.randn(2, batch, states, steps, generator=generator).double()
    a = -torch.rand(channels, states, generator=generator).double()
    arguments = [tensor.requires_grad_() for tensor in (x, dt, a, b, c)]
    options = {"D": torch.ones(channels).double(), "z": z, "delta_bias": torch.randn(channels).double()}
    found = []
    for scan in (mamba_selective_scan, kernel.layers.SelectiveScan()):
        outputs, state = scan(*arguments, **options, delta_softplus=True, return_last_state=True)
        gradients = torch.autograd.grad(outputs.square().sum() + state.sum(), arguments)
        found.append([outputs, state, *gradients])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_a_directory_with_files_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not empty"):
        write_kernel_package(tmp_path)


def test_the_library_loads_the_package_and_maps_its_layers(package):
    pytest.importorskip("kernels.layer")  # the tests of our kernels have a folder of the library's name
    import kernels

    kernel = kernels.get_local_kernel(package)
    assert kernel.available_backends()[-1] == ("cpu" if HAS_KERNEL else "torch")

    @kernels.use_kernel_forward_from_hub("LinearScan")
    class Scan(torch.nn.Module):
        def forward(self, a, b, initial_state=None):
            raise NotImplementedError

    mapping = {"LinearScan": {"cpu": kernels.LocalLayerRepository(package, layer_name="LinearScan")}}
    with kernels.use_kernel_mapping(mapping):
        mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
        model = kernels.kernelize(torch.nn.Sequential(Scan()), mode=mode, device="cpu")
    tensors = inputs(torch.float32)
    torch.testing.assert_close(
        [value.double() for value in results(model[0], tensors)], in_float64(tensors), rtol=1e-5, atol=1e-5
    )
