"""What pyproject.toml cannot say: the README as PyPI can show it, where a relative link or picture leads nowhere; and
that an sdist of a checkout has the files that git tracks, of those that MANIFEST.in names."""

import re
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

REPOSITORY = ""  # the public repository's address, once there is one: https://github.com/OWNER/NAME

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


def for_pypi(markdown: str, repository: str = REPOSITORY) -> str:
    """The README with absolute links; without a repository to point to, pictures go and links become their text."""

    def absolute(match: re.Match[str]) -> str:
        picture, text, path = match.groups()
        if repository:
            return f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/main/{path})"
        return "" if picture else text

    return _LINK.sub(absolute, markdown)


class TrackedSdist(sdist):
    """An sdist without files that git does not track. Where there is no checkout, as in an unpacked sdist, of all
    files."""

    def make_distribution(self) -> None:  # noqa: D102
        if Path(".git").exists():
            listed = subprocess.run(["git", "ls-files", "-z"], stdout=subprocess.PIPE, check=True).stdout
            tracked = {Path(name) for name in listed.decode().split("\0")}
            made = Path(self.get_finalized_command("egg_info").egg_info)
            files = self.filelist.files
            self.filelist.files = [name for name in files if Path(name) in tracked or made in Path(name).parents]
            (made / "SOURCES.txt").write_text("\n".join(self.filelist.files) + "\n")
        super().make_distribution()


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        long_description=for_pypi(readme),
        long_description_content_type="text/markdown",
        cmdclass={"sdist": TrackedSdist},
    )
