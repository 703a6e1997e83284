"""Removal of secrets by their shape, and of home folders, hosts and users, from text before it is a fact."""

import functools
import ipaddress
import os
import re
from collections.abc import Callable
from pathlib import Path

SECRET = "<secret>"
HOST = "<host>"
USER = "<user>"
EMAIL = "<e-mail>"
ADDRESS = "<address>"

LIMIT = 2000
"""Longest text that is kept, in characters; the rest is cut before anything is looked for, and an ellipsis
says so."""

Replacement = str | Callable[[re.Match[str]], str]

PRIVATE_KEY = r"(?s)-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----.*?(?:-----END [A-Z0-9 ]*-----|\Z)"
"""A PEM or PGP block; one that was cut ends with the text."""

TOKENS = r"""(?x)
    (?<![A-Za-z0-9]) (?:
        (?: hf_ | api_org_ | gh[pousr]_ | gsk_ | npm_ | r8_ | lin_api_ | rubygems_ | secret_ | ntn_ | whsec_
          | fw_ | [sr]k_(?:live|test|prod)_ ) [A-Za-z0-9]{16,}
      | sk- [\w-]{16,}                                        # OpenAI, Anthropic
      | (?: github_pat_ | gl(?:pat|ptt|dt|rt|cbt|agent|oas)- | dckr_pat_ | nvapi- | pypi- | wandb_v1_ | xai-
          | pplx- | jina_ | tgp_v1_ | lsv2_(?:pt|sk)_ | figd_ | glsa_ | shp(?:at|ca|pa|ss)_ | do[opr]_v1_
          | pscale_tkn_ | ATATT3x | sq0(?:atp|csp)- | sntry[su]_ | phc_ | AGE-SECRET-KEY-1 )
        (?=[\w-]*[0-9A-Z]) [\w-]{16,}
      | (?: hv[sbr]\. | dp\.pt\. | ya29\. | 1//0 ) [\w.-]{16,}   # Vault, Doppler, Google
      | AIza [\w-]{30,}                                       # Google
      | GOCSPX- [\w-]{20,}
      | xox[a-z]- [\w-]{10,} | xapp- [\w-]{10,}               # Slack
      | SG \. [\w-]{16,} \. [\w-]{16,}                        # SendGrid
      | dapi [0-9a-f]{32} (?:-\d)?                            # Databricks
      | (?: SK | key- ) [0-9a-f]{32} (?![0-9A-Za-z])          # Twilio, Mailgun
      | \d{8,10} : AA [\w-]{33}                               # Telegram
      | eyJ [\w-]{8,} \. [\w.-]{8,} | eyJ [\w+/=-]{40,}       # JSON web token, Neptune
      | (?<!sha256:) (?:[0-9a-f]{40,128} | (?=\d*[A-F]) (?=[A-F]*\d) [0-9A-F]{40,128}) (?![0-9A-Za-z])   # W&B
    )
  | (?<![A-Z0-9]) A(?:KIA|SIA|ROA|IDA|GPA|NPA|NVA|IPA|BIA|CCA|PKA|SCA) [A-Z0-9]{12,}         # Amazon
  | (?: hf_ | api_org_ | gh[pousr]_ | github_pat_ | gsk_ | npm_ | r8_ | glpat- | nvapi-      # behind a letter
      | sk- (?:proj-|ant-(?:api\d\d-)?)? )
    (?=\w*[a-z]) (?=\w*[A-Z]) (?=\w*\d) [A-Za-z0-9]{30,}
  | (?<![\w/+=.-]) (?! [A-Za-z0-9/+]* [a-z]{8}) (?= (?:[^a-z\s]*[a-z]){3})                   # Amazon, alone
    (?: (?= (?:[A-Za-z/+]*\d){3}) (?= (?:[^A-Z\s]*[A-Z]){3})
      | (?= [A-Za-z0-9]*[/+]) (?= [A-Za-z/+]*\d) (?= (?:[^A-Z\s]*[A-Z]){8}) )
    [A-Za-z0-9/+]{40} (?![\w/+=.-])
  | (?<![\w.+-]) (?!1844674407370955\d{4}\b) \d{20,64} (?![\w.])                             # of digits alone
  | (?<![\w~.-]) [\w~.-]{3} \d Q~ [\w~.-]{31,34}              # Azure
    """
"""Tokens that tell themselves by how they begin."""

HOOKS = (
    r"(?i)(?<=://)((?:hooks\.slack\.com/(?:services|workflows)|discord(?:app)?\.com/api/webhooks"
    r"|api\.telegram\.org|[\w-]+\.webhook\.office\.com/webhookb2)/)[\w./:@-]+"
)
"""Addresses to which who knows them may write."""

USER_IN_ADDRESS = r"(?<=://)(?!git@|<)[^/\s@?#'\"]{1,512}(?=@)"
"""``user:password`` or a token before the host of an address."""

PASSWORD = r"passw(?:or)?d|passwd|passphrase|passcode"
STRONG = (
    r"(?:api|app|access|secret|private|account|auth|client|shared|signing|encryption|session|refresh|storage"
    r"|master|service|subscription|license|deploy|webhook|id|csrf|security|bot|personal|sharedaccess)"
    r"[_ -]?(?:key|token)|[A-Za-z]{0,20}secret|credentials?"
)
ASSIGN = r"""["']?\s*(?:=>|[=:])\s*["']?"""
NOTHING = (
    r"(?!(?i:none|null|nil|true|false|unset|missing|required|invalid|empty|str|string|bytes|int)\b|<|\*+"
    r"|\$|%\w+%|\.\.\.)"
)
"""Values after a secret's name that are no secret."""

ASSIGNED = rf"""(?x)
      ( (?i: (?:{PASSWORD}|(?<![A-Za-z])pwd(?={ASSIGN}[^/\\~\s])) {ASSIGN} ) ) {NOTHING} [^\s"',;&)}}\]]+
    | ( (?<![A-Za-z]) (?i: {STRONG} ) {ASSIGN} ) {NOTHING}
          (?=[^\s"',;&]*[A-Za-z]) (?![a-z_]+(?:\.[a-z_0-9]+)+) [^\s"',;&)}}\]]{{6,}}
    | ( \b [A-Z0-9_]* (?: KEY | TOKEN | SECRET | PASS | PAT ) {ASSIGN} ) {NOTHING}
          (?=[^\s"',;&]*[A-Za-z]) [^\s"',;&)}}\]]{{6,}}
    | ( (?i: key | token ) {ASSIGN} )
          (?=[\w+/=~-]*[A-Za-z]) (?: [A-Za-z0-9+/=~-]{{16,}}+ (?![\w.])
            | (?=[\w+/=~-]*\d) (?=[\w+/=~-]*[A-Z]) (?=[\w+/=~-]*[a-z]) [\w+/=~-]{{16,}} )
    """
"""A value after the name of a secret. A password may be short; a mere key or token may be the name of a
parameter."""

HEADER = r"""(?xi)
      ( (?:proxy-)? authorization ["']? \s* [=:] \s* ["']? (?: [A-Za-z-]+ \s+ )?+ ) (?!<) [^\s"',]+
    | ( \b bearer \s+ ) (?=[\w+/=~.-]*[a-z]) [\w+/=~.-]{16,}
    | ( \b x-(?:[a-z]+-)*(?:key|token|secret|auth) ["']? \s* : \s* ["']? ) (?!<) [^\s"',]+
    | ( \b (?:set-)? cookie ["']? \s* : \s* ["']? ) [^\s"'=<]+ = [^\r\n"']+
    """
"""Secrets in an HTTP header."""

QUERY = r"""(?xi)
      ( [?&] (?: sig | [\w-]*signature | x-(?:amz|goog)-(?:credential|security-token) | [\w-]*token
               | [\w-]*key | auth | AWSAccessKeyId | GoogleAccessId | code ) = ) (?!<) [^&\s"'<>]+
    | ( \b (?: sig | x-amz-(?:signature|credential|security-token) | AWSAccessKeyId )
        ["']? \s* [=:] \s* ["']? ) (?!<) [\w%+/=.-]{8,}
    """
"""Signatures in an address."""

QUOTED = rf"""(?x)
      ( (?i: (?:{PASSWORD}) ["']?\s*(?:=>|[=:])\s* | --? (?:[a-z0-9]+[-_])* (?:{PASSWORD}|pass) (?:\s+|=)
          | (?<![A-Za-z]) (?:{STRONG}) ["']?\s*(?:=>|[=:])\s* ) (["']) )
      {NOTHING} (?: (?!\2)[^\r\n] )+ \s (?: (?!\2)[^\r\n] )* (?=\2)
    """
"""A value of several words in quotes after the name of a secret."""

OPTION = rf"""(?xi)
      (?<![\w-]) ( --? (?:[a-z0-9]+[-_])* (?:{PASSWORD}|pass) (?:\s+|=) ["']? ) (?![<-]) [^\s"']+
    | (?<![\w-]) ( -- (?:[a-z0-9]+[-_])* (?:token|key|secret|pat) (?:\s+|=) ["']? )
          (?![<-]) (?=[^\s"']*[a-z]) [^\s"']{{6,}}
    | (?<![\w-]) ( (?: -u | --user ) (?:\s+|=) ["']? [^\s"':<]+ : ) (?![<:]) [^\s"']+
    """
"""Secrets on a command line: ``--password x``, ``-u name:password``."""

MAILBOX = r"(?<![\w.+-])(?!git@)[\w.+-]{1,64}@(?:[\w-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![\w-])"

BEFORE_ADDRESS = (
    r"(?:(?i:\b(?:host|address|addr|ip|server|peer|node|to|from|at|with|on|connect|inet6?|tcp|master|remote"
    r"|client|gateway|bind|endpoint|MASTER_ADDR)\b)[\s:='\"(\[]+|://|@|\[)"
)
QUAD = r"(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)"
IP4 = rf"""(?x) (?!127\.0\.0\.1\b|0\.0\.0\.0\b) (?:
      (?<![\w.=<>~-]) (?: 192\.168 | 172\.(?:1[6-9]|2\d|3[01]) | 169\.254 ) \.\d{{1,3}} \.\d{{1,3}} (?![\w.])
    | (?<![\w.]) {QUAD} (?= :\d{{2,5}}\b | /\d{{1,2}}\b )
    | (?<![\w.-]) ip-\d{{1,3}}-\d{{1,3}}-\d{{1,3}}-\d{{1,3}} (?:\.[\w-]+)*
    )"""
"""Four numbers may be a version of a library: an address is private, has a port, or is said to be one."""

IP4_SAID = rf"({BEFORE_ADDRESS})(?!127\.0\.0\.1\b|0\.0\.0\.0\b){QUAD}(?!\.?\w)"
IP6 = r"(?<![\w:.])(?:[0-9A-Fa-f]{1,4}:){1,7}:?[0-9A-Fa-f]{1,4}(?::{1,2}[0-9A-Fa-f]{1,4}){0,7}(?![\w:])"
MAC = r"(?<![\w:-])(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}(?![\w:-])"

IP4_ALONE = r"((?:[\w.+-]+[ ]*[=:(]*[ ]*)?)(?<![\w.=<>~-])(10\.(?:\d{1,3}\.){2}\d{1,3})(?![\w.])"
"""An address of a private network behind a word, which may be a package's."""

VERSIONED = re.compile(r"(?i)nvidia|\bcu[a-z]|-cu\d|version|driver|release|toolkit|rand|lib")
"""Words behind which four numbers are a version."""

HOST_SAID = r"""(?x)
      ( \b (?: MASTER_ADDR | HOSTNAME | SLURMD_NODENAME | SLURM_JOB_NODELIST | SLURM_NODELIST | hostname
             | nodename ) ["']? \s* [=:] \s* ["']? ) (?!localhost\b|127\.|<) [\w.\[\],-]+
    | (?<![\w.-]) ( ) [\w-]{1,63} (?:\.[\w-]{1,63}){0,6} \.(?: (?:compute|ec2|c\.[\w-]+)\.internal
             | svc\.cluster\.local | localdomain | corp\.[\w.-]*\w | intra\.[\w.-]*\w )
    """
"""Names of machines that are said to be such, or end as no public name does."""

NAME = r"[^/\\\s:;,'\"<>]+"
HOMES = rf"""(?x)
    (?: / (?:homes?\d* | Users) /
      | (?i: (?: [a-z]: | <host> ) [\\/]+ (?: users | documents[ ]and[ ]settings ) [\\/]+ ) )
    (?: {NAME} (?: [ ]{NAME} ){{1,2}} (?=[\\/]) | {NAME} ) (?: : (?=[A-Za-z]) {NAME} )*
  | (?<![\w.])/root(?![\w.-])
  | (?<![\w.~/\\<>=-]) ~[A-Za-z_] (?: [\w.-]* (?=[/\\'"]) | [\w.-]{{3,}} \Z )
    """
FOLDERS = r"""(?x) (?<![\w.~>/-])
    (/ (?: scratch\d* | lustre\d* | gpfs\d* | beegfs | fsx | nobackup | checkpoint | users | nfs | afs | mnt
         | media | net | Volumes ) ) / ((?: [^/\s:;,'"<>()\[\]]+ / )*) ([^/\s:;,'"<>()\[\]]+)"""
"""Folders below which people have theirs."""

SHARE = r"""(?<![\w\\:])(?:\\\\){1,2}[A-Za-z0-9][\w.$-]*(?:\\{1,2})[^\s\\'"<>]+"""
"""``\\\\server\\share``, as Windows calls it, or as Python's repr does."""


@functools.lru_cache(1024)
def without_secrets(text: str) -> str:
    """Remove everything with the shape of a secret, an address or a home folder; cut at `LIMIT`."""
    text = cut(text)
    for contained, pattern, instead in REPLACEMENTS:
        if _compiled(contained).search(text):
            text = _compiled(pattern).sub(instead, text)
    return cut(text)


def without_credentials(text: str) -> str:
    """Remove credentials only, in text for its user; keep folders and addresses."""
    for contained, pattern, instead in REPLACEMENTS:
        if (instead is _value or SECRET in str(instead)) and _compiled(contained).search(text):
            text = _compiled(pattern).sub(instead, text)
    return text


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile the pattern once in a process; `re` forgets patterns if many are in use."""
    return re.compile(pattern)


def cut(text: str) -> str:
    """Return the text, or its first words if it is longer than `LIMIT`.

    A last word of up to 200 characters is dropped: half a token does not read as one.
    """
    if len(text) <= LIMIT:
        return text
    kept = text[: LIMIT - 1]
    ragged = kept[-200:].split(" ")[-1] if not text[LIMIT - 1].isspace() else ""
    return kept[: len(kept) - len(ragged)] + "…"


def _value(match: re.Match[str]) -> str:
    """Remove the value of a secret and keep its name."""
    return next(group for group in match.groups() if group is not None) + SECRET


def _six(match: re.Match[str]) -> str:
    """Remove an IPv6 address, and not a slice of a list or a time of day."""
    text = match[0]
    groups = [group for group in text.split(":") if group]
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return text
    said = len(groups) > 2 or re.fullmatch("(?i)fe80|f[cd]..", groups[0])
    return ADDRESS if said else text


def _folder(match: re.Match[str]) -> str:
    return f"{match[1]}/{USER}/{match[3]}" if match[2] else f"{match[1]}/{USER}"


def _private(match: re.Match[str]) -> str:
    return match[0] if VERSIONED.search(match[1]) else match[1] + ADDRESS


REPLACEMENTS: tuple[tuple[str, str, Replacement], ...] = (
    ("PRIVATE KEY", PRIVATE_KEY, SECRET),
    ("://", HOOKS, rf"\1{SECRET}"),
    ("://", USER_IN_ADDRESS, SECRET),
    (r"\S{15}", TOKENS, SECRET),
    (r"(?i)authorization|bearer|\bx-|cookie", HEADER, _value),
    (r"(?i)[?&]|\b(?:sig|x-amz|aws)", QUERY, _value),
    (r"(?i)pass|secret|key|token|credential", QUOTED, _value),
    (rf"(?i)(?:{PASSWORD}|pwd|key|token|secret|credentials?|pass|pat){ASSIGN}", ASSIGNED, _value),
    (r"(?<![\w-])--?\w", OPTION, _value),
    ("@", MAILBOX, EMAIL),
    ("[:-]..[:-]", MAC, ADDRESS),
    (r"(?:\d+\.){3}", IP4_SAID, rf"\1{ADDRESS}"),
    (r"(?:\d+\.){3}|ip-\d", IP4, ADDRESS),
    (r"\b10\.", IP4_ALONE, _private),
    (":[0-9A-Fa-f:]", IP6, _six),
    (
        "ADDR|HOSTNAME|NODE|hostname|nodename|internal|cluster|localdomain|corp|intra",
        HOST_SAID,
        lambda match: (match[1] or "") + HOST,
    ),
    (r"\\\\", SHARE, HOST),
    ("(?i)home|users|settings|root|~[a-z_]", HOMES, "~"),
    (r"(?<![\w.~>/-])/\w", FOLDERS, _folder),
)
"""Words of every match, pattern, and replacement.

To make all patterns takes 10 ms of every start: one is made for the first text that has its words. In this
order: the name of a secret is looked for before its value.
"""


COMMON_HOSTS = frozenset(
    "localhost ubuntu debian linux server node host machine desktop cuda torch model train root".split()
)
"""Host names that are ordinary words of reports and say nothing about whose machine it is."""

COMMON_USERS = frozenset("root user runner ubuntu nobody jovyan home torch model data tmp src app".split())
"""User names that are ordinary names of folders."""


def scrub(text: str) -> str:
    """Remove secrets, home folders, and this host's and user's names; cut at `LIMIT`."""
    text = cut(text)
    for home in _homes():
        text = re.sub(rf"(?<![\w.]){re.escape(home)}(?![\w.-])", "~", text)
    for pattern, instead in _names():
        text = pattern.sub(instead, text)
    return without_secrets(text)


@functools.cache
def _homes() -> tuple[str, ...]:
    """List this user's home folders, as named and as resolved, the longest first; never the root."""
    named = {os.path.expanduser("~"), os.environ.get("HOME", ""), os.environ.get("USERPROFILE", "")}
    folders = {folder.rstrip("/\\") for name in named if name for folder in (name, str(Path(name).resolve()))}
    return tuple(
        sorted((folder for folder in folders if len(folder) > 1 and folder != "~"), key=len, reverse=True)
    )


@functools.cache
def _names() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Make patterns of this host's names as words, and of the user's name in a path."""
    import getpass
    import socket

    # the full name is not asked for: that may wait for a name server
    variables = ("HOSTNAME", "SLURMD_NODENAME", "COMPUTERNAME")
    named = {socket.gethostname(), *(os.environ.get(variable, "") for variable in variables)}
    domain = r"(?:internal|local|localdomain|lan|corp|(?:[a-z][\w-]*\.)+[a-z]{2,})\b"
    hosts = sorted({part for name in named for part in (name, name.partition(".")[0])}, key=len, reverse=True)
    patterns = [
        (re.compile(rf"(?i)\b{re.escape(name)}\b(?:\.{domain})?"), HOST)
        for name in hosts
        if len(name) > 3 and name.lower() not in COMMON_HOSTS  # a shorter one is inside ordinary words
    ]
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        return tuple(patterns)
    if len(user) > 1 and user.lower() not in COMMON_USERS:
        patterns.append((re.compile(rf"(?<=[/\\_]){re.escape(user)}(?=[/\\]|$)"), USER))
    return tuple(patterns)
