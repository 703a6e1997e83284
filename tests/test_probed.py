"""The versions of messages and bugs are those that `research.versions.probed` found in the releases."""

from research.versions.probed import rows, table


def test_each_row_was_probed_with_its_versions_or_says_why_not() -> None:
    probed = {
        (each.package, each.name, each.versions) for each in rows() if not each.probed.startswith("no: ")
    }
    assert not probed - table(), "python -m research.versions.probed FOLDER"
