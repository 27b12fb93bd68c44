#!/usr/bin/env bash
# Installs the Debian 12 packages that building and testing need (root or sudo). Quick when they are
# there. The CUDA toolkit is not a Debian package: without it the CPU product is built.
set -euo pipefail
packages=(g++ cmake ninja-build pkg-config ccache mold
  nlohmann-json3-dev libfmt-dev libspdlog-dev libcli11-dev libboost1.81-dev libpcre2-dev libdnnl-dev
  libjpeg62-turbo-dev libpng-dev libwebp-dev
  libavformat-dev libavcodec-dev libavutil-dev libswscale-dev zlib1g-dev libedit-dev
  libgtest-dev libbenchmark-dev)
if [[ "${1:-}" == "--fuzz" ]]; then
  packages+=(clang-14 libclang-rt-14-dev)
fi
missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  echo "packages: all there"
  exit 0
fi
sudo=""
if [[ $(id -u) != 0 ]]; then
  command -v sudo >/dev/null || { echo "run as root or install sudo; missing packages: ${missing[*]}" >&2; exit 1; }
  sudo=sudo
fi
echo "packages: installing ${#missing[@]} (about a minute): ${missing[*]}"
$sudo apt-get update -qq
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
