"""`--verify-fixes` and `--apply`: try the diffs of an audit in runs of the program, and write those that held.

The program is run again, unchanged and with the fixes in place; its files stay as they are unless `apply` is asked for.
How a fix is found is `optpass.auditing.fixes`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optpass.auditing.comparison import Same, compare, load
from optpass.auditing.fixes import patch
from optpass.auditing.fixes.reading import SourceFile, read
from optpass.auditing.fixes.rewrite import Proposal, compose, place_of, proposals
from optpass.auditing.fixes.source import apply_edits
from optpass.auditing.runner import Ended, Job, run
from optpass.errors import AuditError
from optpass.reporting.audit.model import Audit, Break

#: Calls of compiled functions whose outputs are compared.
CALLS = 20
#: Runs of the program for one verification, the unchanged one included.
RUNS = 12


@dataclass
class _Fix:
    """A break and the changes that may remove it, the preferred one first."""

    index: int
    brk: Break
    file: str
    options: list[Proposal]
    tried: int = 0

    @property
    def proposal(self) -> Proposal:
        return self.options[self.tried]


@dataclass(frozen=True)
class _Run:
    """What one run showed."""

    ended: Ended
    outputs: list[dict[str, object]] | None
    stdout: bytes

    @property
    def breaks(self) -> list[Break]:
        return self.ended.audit.breaks if self.ended.audit is not None else []


class Verification:
    """Tries fixes in runs of one program.

    Args:
        found: the audit whose breaks are to be fixed.
        job: how it was run.
    """

    def __init__(self, found: Audit, job: Job) -> None:
        self.found, self.job = found, job
        self.files: dict[str, SourceFile] = {}
        self.fixes: list[_Fix] = []
        self.confirmed = False
        self._runs = 0
        self._steady: Same | None = None
        for index, brk in enumerate(found.breaks):
            if brk.fix.diff and brk.caused_by is None:
                self._add(index, brk)

    def _add(self, index: int, brk: Break) -> None:
        file, _ = place_of(brk)
        try:
            known = self.files.get(file) or read(Path(file))
        except AuditError as error:
            brk.fix.outcome = f"not tried: {error}"
            return
        options = proposals(brk, known.text)
        first = patch.unified(file, known.text, apply_edits(known.text, options[0].edits)) if options else ""
        if not patch.same_change(first, brk.fix.diff):
            brk.fix.outcome = f"not tried: {file} was changed since the audit"
            return
        self.files[file] = known
        self.fixes.append(_Fix(index, brk, file, options))

    def run(self) -> None:
        """Try all fixes, and fill `verified` and `outcome` of each.

        All are tried together first. What does not hold there is tried alone, and its alternatives after it.
        """
        if not self.fixes:
            return
        self._before = self._run([])
        self._leave_out_unmet()
        if not self.fixes:
            return
        together = self._without_conflicts()
        after = self._run(together)
        self._judge(together, after)
        sound = self._same(after).equal  # then a break that is still there stays there alone too
        for fix in self.fixes:
            if fix.brk.fix.verified is None and fix in together:
                continue  # nothing can be compared, alone no more than together
            if not fix.brk.fix.verified:
                self._alone(fix, tried=fix in together and (sound is True or together == [fix]))
            self._settle(fix)
        self.confirmed = all(fix.brk.fix.verified for fix in together) and len(together) == len(self.fixes)

    def _leave_out_unmet(self) -> None:
        """A break that the unchanged program does not meet again would be gone with any change."""
        met = {(place_of(brk), brk.gb_type) for brk in self._before.breaks}
        for fix in self.fixes:
            if (place_of(fix.brk), fix.brk.gb_type) not in met:
                fix.brk.fix.outcome = "not tried: run once more, unchanged, the program's first process did not meet it"
        self.fixes = [fix for fix in self.fixes if not fix.brk.fix.outcome]

    def _alone(self, fix: _Fix, *, tried: bool) -> None:
        """Try a fix by itself, then its alternatives; where none holds, what was told of the first stands."""
        first = (fix.brk.fix.verified, fix.brk.fix.outcome) if tried else None
        for option in range(1 if tried else 0, len(fix.options)):
            if self._runs >= RUNS:
                break
            fix.tried = option
            if self._judge([fix], self._run([fix])):
                return
            first = first or (fix.brk.fix.verified, fix.brk.fix.outcome)
        fix.tried = 0
        fix.brk.fix.verified, fix.brk.fix.outcome = first or (
            fix.brk.fix.verified,
            fix.brk.fix.outcome or f"not tried: {RUNS} runs of the program were made",
        )

    def confirm(self) -> bool:
        """Whether the fixes that held do so together; runs the program once more where that was not seen yet."""
        held = [fix for fix in self.fixes if fix.brk.fix.verified]
        if self.confirmed or len(held) < 2:
            return True
        kept = [fix.brk.fix.model_copy() for fix in held]
        holds = self._judge(held, self._run(held))
        if not holds:
            for fix, before in zip(held, kept, strict=True):
                fix.brk.fix = before
        return holds

    def _settle(self, fix: _Fix) -> None:
        """Show the alternative that held."""
        text = self.files[fix.file].text
        after = apply_edits(text, fix.proposal.edits)
        fix.brk.fix.diff = patch.unified(fix.file, text, after, self.found.root)
        fix.brk.fix.note = fix.proposal.note

    def _without_conflicts(self) -> list[_Fix]:
        kept: list[_Fix] = []
        for fix in self.fixes:
            same = [other.proposal for other in kept if other.file == fix.file]
            edits = compose([*same, fix.proposal])
            if all(edit in edits for edit in fix.proposal.edits):
                kept.append(fix)
        return kept

    # ---- runs ----------------------------------------------------------------------------------------------------

    def _texts(self, fixes: Sequence[_Fix]) -> dict[str, str]:
        """Each changed file's text with the fixes in it."""
        texts = {}
        for file in dict.fromkeys(fix.file for fix in fixes):
            edits = compose([fix.proposal for fix in fixes if fix.file == file])
            texts[file] = apply_edits(self.files[file].text, edits)
        return texts

    def _run(self, fixes: Sequence[_Fix]) -> _Run:
        """Run the program with some fixes in place."""
        self._runs += 1
        with tempfile.TemporaryDirectory(prefix="optpass-trial-") as name:
            folder = Path(name)
            replaced = {}
            for number, (file, text) in enumerate(self._texts(fixes).items()):
                copy = folder / f"{number}.py"
                copy.write_bytes(text.encode(self.files[file].encoding))
                replaced[file] = str(copy)
            control, outputs = folder / "trial.json", folder / "outputs.pt"
            control.write_text(
                json.dumps({"files": replaced, "outputs": str(outputs), "calls": CALLS}), encoding="utf-8"
            )
            with (folder / "out").open("w+b") as out, (folder / "err").open("w+b") as err:
                ended = run(replace(self.job, trial=control, stdout=out.fileno(), stderr=err.fileno()))
            return _Run(ended, load(outputs), (folder / "out").read_bytes())

    def _judge(self, fixes: Sequence[_Fix], after: _Run) -> bool:
        """Fill in what a run showed of each fix in it; whether all of them held."""
        texts = self._texts(fixes)
        same = self._same(after)
        for fix in fixes:
            gone, told = self._gone(fix, texts[fix.file], after)
            fix.brk.fix.verified = None if same.equal is None and gone else gone and bool(same.equal)
            fix.brk.fix.outcome = f"tried on a copy: {told}; {same.told}"
        return all(fix.brk.fix.verified for fix in fixes)

    def _same(self, after: _Run) -> Same:
        """Whether the program computed the same and ended the same."""
        before = self._before
        if after.ended.code != before.ended.code:
            why = f" ({after.ended.how})" if after.ended.how else ""
            return Same(False, f"the program ended with exit code {after.ended.code}{why}, {before.ended.code} before")
        same = compare(before.outputs, after.outputs)
        if same.equal is False:
            if self._steady is None:
                self._steady = compare(before.outputs, self._run([]).outputs)
            if self._steady.equal is False:
                return Same(None, "outputs differ from run to run even unchanged, so they cannot be compared")
            return Same(False, f"outputs differ: {same.told}")
        if before.stdout != after.stdout:
            return Same(same.equal, f"{same.told}; standard output differs")
        return same

    def _gone(self, fix: _Fix, text: str, after: _Run) -> tuple[bool, str]:
        """Whether the break is gone and nothing came in its place, and that in words.

        Where Dynamo gave up on the function at this break it never saw what stands behind it: another break further
        on, in lines that the fix left alone, then is no fault of the fix.
        """
        place = patch.line_map(self.files[fix.file].text, text)
        file, line = place_of(fix.brk)
        here = set(place(line))
        old = [brk for brk in self._before.breaks if place_of(brk)[0] == file]
        known = {(number, brk.gb_type) for brk in old for number in place(place_of(brk)[1])}
        functions = {brk.function for brk in old if place_of(brk)[1] == line}
        behind = ""
        for brk in after.breaks:
            number = place_of(brk)[1]
            if place_of(brk)[0] != file:
                continue
            if number in here and brk.gb_type == fix.brk.gb_type:
                return False, "the break is still there"
            made = number in here or any(brk.function.startswith(f"{name}.<locals>.if_") for name in functions)
            if made or (brk.function in functions and (number, brk.gb_type) not in known):
                told = f"there is another{self._was(number, place, file)}: {brk.gb_type}"
                if made or fix.brk.effect not in ("frame eager", "rest eager"):
                    return False, f"this break is gone, but {told}"
                behind = behind or f"; behind it {told}"
        return True, f"the break is gone{behind}"

    def _was(self, number: int, place: Callable[[int], range], file: str) -> str:
        lines = self.files[file].text.count("\n") + 1
        old = [line for line in range(1, lines + 1) if number in place(line)]
        return f" at line {old[0]}" if old else ""


def verify_fixes(found: Audit, job: Job, *, apply: bool = False) -> Audit:
    """Try each diff of an audit: is the break gone, are outputs equal; then, if asked for, change the files.

    The program runs up to `RUNS` times, with seeds set before it starts, with what it does besides (files written,
    downloads) each time.

    Args:
        found: the audit; `fix.verified` and `fix.outcome` of its breaks are filled in place.
        job: how the program was run.
        apply: write the diffs that held.

    Raises:
        AuditError: a file was changed in the meantime, or cannot be written.
    """
    verification = Verification(found, job)
    verification.run()
    if not verification.fixes:
        found.notes.append("no fix could be tried: no break has one that is mechanical")
    if apply:
        found.notes += apply_fixes(verification)
    return found


def apply_fixes(verification: Verification) -> list[str]:
    """Write the fixes that held into the user's files; one line per file.

    Raises:
        AuditError: a file is not as it was when the fixes were tried, or cannot be written. Files before it are
            written then; each is written as a whole or not at all.
    """
    held = [fix for fix in verification.fixes if fix.brk.fix.verified]
    if not verification.confirm():
        return ["no file was changed: each fix held by itself, but not all of them together"]
    told = []
    for file, text in verification._texts(held).items():
        known = verification.files[file]
        if read(Path(file)) != known:
            raise AuditError(f"{file} was changed while its fixes were tried; nothing was written to it")
        patch.write(Path(file), text, known.encoding)
        number = sum(fix.file == file for fix in held)
        told.append(f"changed {file}: {number} {'fixes' if number != 1 else 'fix'}")
    return told or ["no file was changed: no fix held"]
