"""The build hook: compiles the CPU kernels into the wheel, or next to the sources of an editable install.

`NPUGRAD_BUILD_KERNELS=0` leaves them out; `1` makes a failure an error. Otherwise, if there is no compiler or
it fails, the install continues: the CPU backend then runs the reference and says so. The variant of this
processor comes first; `pip install -v` shows a line about each.

`NPUGRAD_WHEEL_PLATFORM=manylinux_2_28_aarch64` makes a wheel for other machines; CXX must be a compiler for
that glibc and machine. `make wheels` has one.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PACKAGE = "npugrad_server/backends/cpu/lib"
_PLATFORM = "NPUGRAD_WHEEL_PLATFORM"


class KernelsBuildHook(BuildHookInterface):  # type: ignore[type-arg, misc, unused-ignore]
    """Runs `build.py` before a wheel is assembled."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds the libraries and tags the wheel with their platform, for any Python 3."""
        build = _build_module(Path(self.root) / "kernels" / "build.py")
        wanted = os.environ.get(build.SETTING, "").strip()
        platform = os.environ.get(_PLATFORM, "").strip()
        if platform and (wanted == "0" or version == "editable"):
            raise build.BuildError(
                f"found {_PLATFORM} with {build.SETTING}=0 or an editable install; "
                "expected a wheel with kernels"
            )
        if wanted == "0" or self.target_name != "wheel":
            return
        try:
            made = self._build(build, platform)
        except build.BuildError as error:
            if wanted == "1" or platform:
                raise
            self.app.display_warning(
                f"npugrad-server: no compiled kernels, the CPU backend will run its reference: {error}"
            )
            return
        if version == "editable":
            return  # the loader finds them next to itself
        # Git ignores them, so they are named one by one.
        for one in made:
            build_data["force_include"][str(one.path)] = f"{_PACKAGE}/{one.path.name}"
        build_data["pure_python"] = False
        platform = platform or sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def _build(self, build: Any, platform: str) -> Any:
        root = Path(self.root)
        if not platform:
            return build.build(root / _PACKAGE, tell=self.app.display_info)
        known = re.fullmatch(r"manylinux_\d+_\d+_(\w+)", platform)
        if known is None:
            raise build.BuildError(
                f"found {_PLATFORM}={platform}; expected one such as manylinux_2_28_x86_64"
            )
        # Not next to the loader, which would load them on this machine.
        return build.build(root / "build" / platform, target=known[1], tell=self.app.display_info)


def _build_module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("npugrad_kernels_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module
