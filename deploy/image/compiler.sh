#!/bin/sh
# Gives the build stage a C++ compiler for the CPU kernels, by the base's own package manager.
#
# Slim Python images have none. One that the base has is taken as it is. With NPUGRAD_BUILD_KERNELS=0 no kernels are
# built and nothing is installed. Only what is compiled reaches the runtime stage, so the compiler's version is the
# distribution's choice.
set -eu

if [ "${NPUGRAD_BUILD_KERNELS:-1}" = 0 ]; then
    echo "compiler.sh: NPUGRAD_BUILD_KERNELS=0, no compiler needed"
    exit 0
fi
for compiler in c++ g++ clang++; do
    if command -v "$compiler"; then
        exit 0
    fi
done

# Debian, Ubuntu: the static C++ runtime comes along. openEuler and its kin have it in a package of its own; without
# it the kernels use the base's libstdc++, which is the same in both stages.
if command -v apt-get; then
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends g++
elif command -v dnf; then
    dnf install --assumeyes gcc-c++
    dnf install --assumeyes libstdc++-static || echo "compiler.sh: no libstdc++-static here"
elif command -v yum; then
    yum install --assumeyes gcc-c++
    yum install --assumeyes libstdc++-static || echo "compiler.sh: no libstdc++-static here"
else
    echo "compiler.sh: found no c++, g++ or clang++, and no apt-get, dnf or yum to install one with;" \
        "take a base with a compiler, or NPUGRAD_BUILD_KERNELS=0 for an image without CPU kernels" >&2
    exit 1
fi
