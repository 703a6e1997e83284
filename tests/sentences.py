"""Write ``docs/sentences.md``, each sentence of an answer and who needs it: ``python -m tests.sentences``."""

from collections import Counter
from unittest.mock import patch

from fp8doctor.answer import sentences
from fp8doctor.answer.sentences import TEMPLATES
from tests.markdown import ROOT, table
from tests.replays import ALL, replayed

PAGE = ROOT / "docs" / "sentences.md"

HEAD = """# The sentences of an answer

The box on the first screen fills these templates of `fp8doctor/answer/sentences.py`, and no others. The last
column counts the recordings that use each, of {count}. Add a template only if three recordings need it.
`python -m tests.refresh sentences` writes this page.

"""


def counted() -> Counter[str]:
    """Count the recordings whose answer uses each template, alone or as a part of another."""
    used = Counter[str]()
    for path in ALL:
        with patch.object(sentences, "say", wraps=sentences.say) as say:
            sentences.box(replayed(path).report.answer)
        used.update({call.args[0] for call in say.call_args_list})
    return used


def page(used: Counter[str]) -> str:
    rows = ((f"`{name}`", f"`{words}`", str(used[name])) for name, words in TEMPLATES.items())
    return HEAD.format(count=len(ALL)) + table(("template", "words", "recordings"), rows)


if __name__ == "__main__":
    PAGE.write_text(page(counted()), encoding="utf-8")
