"""The build hook: compiles the CPU kernels into the wheel, or beside the sources of an editable install.

`NPUGRAD_BUILD_KERNELS=0` leaves them out, for hosts that only run the client; `1` makes a failure an error.
Else, without a compiler or when it fails, the install goes on: the CPU backend then runs the reference and
says so.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PACKAGE = "server/npugrad_server/backends/cpu/lib"


class KernelsBuildHook(BuildHookInterface):  # type: ignore[type-arg, misc, unused-ignore]
    """Runs `build.py` before a wheel is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds the libraries and makes the wheel one of this platform, for any Python 3."""
        build = _build_module(Path(self.root) / "server" / "kernels" / "build.py")
        wanted = os.environ.get(build.SETTING, "").strip()
        if wanted == "0" or self.target_name != "wheel":
            return
        try:
            made = build.build(Path(self.root) / _PACKAGE)
        except build.BuildError as error:
            if wanted == "1":
                raise
            self.app.display_warning(
                f"npugrad: no compiled kernels, the CPU backend will run its reference: {error}"
            )
            return
        if version == "editable":
            return  # the loader finds them beside itself
        # Ignored by git, so named one by one.
        for one in made:
            name = f"{_PACKAGE}/{one.path.name}"
            build_data["force_include"][str(one.path)] = name.removeprefix("server/")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def _build_module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("npugrad_kernels_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module
