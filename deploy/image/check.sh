#!/bin/sh
# Ends the build of an image whose server does not start, or whose CPU device would run the slow reference.
#
#   check.sh SERVER     SERVER is the command npugrad-server
#
# With NPUGRAD_BUILD_KERNELS=0 the reference is what was asked for.
set -eu

# What it found is printed either way: it says what is missing. Ports of the build's host are none of its concern.
found=$("$1" check --devices cpu:0 --listen 127.0.0.1:0 --metrics-listen 127.0.0.1:0) || {
    printf '%s\n' "$found"
    exit 1
}
printf '%s\n' "$found"
case "${NPUGRAD_BUILD_KERNELS:-1}:$found" in
    0:* | *"host CPU, compiled kernels ("*) ;;
    *)
        echo "check.sh: no compiled kernels; NPUGRAD_BUILD_KERNELS=0 makes an image without them" >&2
        exit 1
        ;;
esac
