"""What pyproject.toml cannot say: the README as PyPI can show it, where a relative link or picture leads nowhere."""

import re
from pathlib import Path

from setuptools import setup

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


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=for_pypi(readme), long_description_content_type="text/markdown")
