"""An image builder, shared by the tests that really build images."""

from collections.abc import Iterator

import pytest

from tests.docker.buildah import Buildah


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """With the base image that stands in for the public one."""
    buildah = Buildah(tmp_path_factory.mktemp("buildah"))
    buildah.import_debian()
    yield buildah
    buildah.clean()
