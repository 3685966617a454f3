"""The page: components of Gradio, and what their events do with a visitor."""

import base64
import binascii
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from pydantic import ValidationError

from hf_recurrent.server.page import drawing
from hf_recurrent.server.page.visitor import Visitor, Visitors
from hf_recurrent.server.routes.errors import ApiError, error_body, value_error
from hf_recurrent.server.routes.schemas import GenerateRequest
from hf_recurrent.server.routes.served_model import ServedModel

_FOLDER = Path(__file__).parent
_MOST_BYTES = 2000  # that one click generates
_MOST_TIMES = 50  # that one click reads a text
_EXAMPLE = "It was a dark night, and the wind was cold. It was a dark night, and"

STYLE = (_FOLDER / "page.css").read_text(encoding="utf-8")
SCRIPT = (_FOLDER / "page.js").read_text(encoding="utf-8")

Work = Callable[..., AsyncIterator[str | None]]


class Page:
    """The page of a model.

    Args:
        served: the model.

    Attributes:
        blocks: the page as Gradio has it.
    """

    def __init__(self, served: ServedModel):
        self._served, self._visitors = served, Visitors(served)
        self._state_bytes = sum(part.nbytes for part in served.scheduler.store.zero.values())
        title = f"{served.settings.name}: a model that remembers"
        with gr.Blocks(title=title, analytics_enabled=False) as self.blocks:
            self._lay_out()
            self._connect()
        self.blocks.queue(max_size=256, default_concurrency_limit=None, api_open=False)

    @property
    def inputs(self) -> dict[int, int]:
        """Number of each function that a browser may call → how many values it takes."""
        return {number: len(each.inputs) for number, each in self.blocks.fns.items() if each.fn is not None}

    # ---- Components

    def _lay_out(self) -> None:
        name, size = drawing.escape(self._served.settings.name), drawing.size(self._state_bytes)
        learner = self._served.scheduler.learner
        self._html(
            f"<h1>{name}</h1><p>A recurrent model reads what you write, byte by byte. <b>Colour is surprise</b>: the "
            f"stronger, the less the model expected the byte. All it remembers is a state of {size}, however "
            "long the text: mark it, go back, fork it, or take it with you.</p>",
            "head",
        )
        with gr.Row(equal_height=False):
            with gr.Column(scale=5, min_width=320):
                self.draft = gr.Textbox(label="Write or paste text", value=_EXAMPLE, lines=3, max_lines=12)
                with gr.Row(elem_classes="buttons"):
                    self.continue_ = gr.Button("Continue", variant="primary", min_width=90)
                    self.read = gr.Button("Read", min_width=70)
                    self.stop = gr.Button("Stop", min_width=70)
                self.note = self._html("", "note")
                self.measures = self._html("", "measures")
                self._html(f'<div class="text-head"><h2>Text</h2>{drawing.draw_legend()}</div>', "text-head")
                frame = '<div class="text" tabindex="0" role="region" aria-label="Text"><div>${value}</div></div>'
                self.text = self._html("", "text", html_template=frame)
                self._html(
                    "Underlined bytes were written by the model. Point at a character for its bits; a character of "
                    "several bytes has a stripe for each.",
                    "hint",
                )
            with gr.Column(scale=3, min_width=300):
                self.curve = self._html("", "curve")
                with gr.Group():
                    self.texts = gr.Radio(["Text 1"], value="Text 1", label="Texts")
                    with gr.Row(elem_classes="buttons"):
                        self.fork = gr.Button("Fork", size="sm", min_width=60)
                        self.new = gr.Button("New", size="sm", min_width=60)
                        self.save = gr.Button("Save state", size="sm", min_width=90)
                        self.load = gr.Button("Load state", size="sm", min_width=90)
                with gr.Group():
                    self.marks = gr.Dropdown([], label="Marks", info="places in this text to go back to")
                    with gr.Row(elem_classes="buttons"):
                        self.mark = gr.Button("Mark this place", size="sm", min_width=110)
                        self.rewind = gr.Button("Rewind", size="sm", min_width=80)
                with gr.Group(visible=learner is not None):
                    self.learns = gr.Checkbox(
                        label="Learn from what this text reads", info="the model changes, for everybody"
                    )
                    self.times = gr.Slider(1, _MOST_TIMES, 1, step=1, label="Read it so many times")
                with gr.Accordion("How it continues", open=False):
                    most = min(_MOST_BYTES, self._served.settings.max_new_tokens)
                    self.count = gr.Slider(1, most, min(300, most), step=1, label="Bytes")
                    self.temperature = gr.Slider(
                        0, 2, 0.7, step=0.05, label="Temperature", info="0 takes the likeliest byte"
                    )
                if learner is None:
                    self._html("This server does not learn; start it with <code>--learn</code>.", "no-learning")
        # Files pass through the browser's own dialogs, as base64: the server writes and opens none.
        self.content, self.file_name = gr.Textbox(visible=False), gr.Textbox(visible=False)

    @staticmethod
    def _html(value: str, name: str, **options: Any) -> gr.HTML:
        options |= {"padding": False, "apply_default_css": False, "js_on_load": None}
        return gr.HTML(value, elem_id=f"page-{name}", **options)

    # ---- Events

    def _connect(self) -> None:
        self._on(self.blocks.load, self._start, creates=True)
        self._on(self.read.click, self._read, [self.draft, self.times])
        self._on(self.continue_.click, self._continue, [self.draft, self.count, self.temperature])
        self._on(self.stop.click, self._stop)
        self._on(self.mark.click, self._mark)
        self._on(self.rewind.click, self._rewind, [self.marks])
        self._on(self.fork.click, self._fork)
        self._on(self.new.click, self._new)
        self._on(self.texts.input, self._choose, [self.texts])
        self._on(self.learns.input, self._learn, [self.learns])
        loading = [self.content, self.file_name]
        self._on(self.load.click, self._load, loading, js="() => hfRecurrent.chooseFile()")
        saving = self.save.click(
            self._save,
            outputs=[self.content, self.note],
            show_progress="hidden",
            concurrency_limit=None,
            api_visibility="private",
        )
        saving.then(
            None, self.content, self.content, show_progress="hidden", js="(data) => hfRecurrent.download(data)"
        )
        self.blocks.unload(self._unload)

    def _on(
        self, listen: Callable[..., Any], work: Work, inputs: Sequence[Any] = (), creates: bool = False, **options: Any
    ) -> None:
        """Run the work of an event and show the visitor's text as it grows."""
        takes_draft = self.draft in inputs

        async def run(request: gr.Request, *values: Any) -> AsyncIterator[list[Any]]:
            visitor, note, draft = None, None, None
            try:
                visitor = await self._visitors.get(request.session_hash, creates)
                async for note in work(visitor, *values):
                    draft = "" if takes_draft else None  # it was read
                    yield self._grown(visitor, note)
                shown = drawing.draw_note(note or "")
            except Exception as error:
                shown = drawing.draw_note(_message(error), is_error=True)
            yield self._whole(visitor, shown, draft)

        listen(
            run,
            list(inputs),
            [self.note, self.measures, self.text, self.curve, self.texts, self.marks, self.learns, self.draft],
            show_progress="hidden",
            concurrency_limit=None,
            api_visibility="private",
            preprocess=False,  # of hostile values, Gradio writes tracebacks; the work checks them itself
            **options,
        )

    def _grown(self, visitor: Visitor, note: str | None) -> list[Any]:
        """The outputs while something runs."""
        transcript = visitor.text.transcript
        return [
            drawing.draw_note(note or ""),
            drawing.draw_measures(transcript, self._state_bytes),
            drawing.draw_text(transcript),
            drawing.draw_curve(transcript.curve),
            *[gr.skip()] * 4,
        ]

    def _whole(self, visitor: Visitor | None, note: str, draft: str | None) -> list[Any]:
        """The outputs at the end of an event; the draft stays as it is where it is None."""
        if visitor is None:
            return [note, *[gr.skip()] * 7]
        text = visitor.text
        marks = list(text.marks)
        return [
            note,
            *self._grown(visitor, None)[1:4],
            gr.update(choices=[each.name for each in visitor.texts], value=text.name),
            gr.update(choices=marks, value=text.last_mark),
            gr.update(value=text.learns),
            gr.skip() if draft is None else draft,
        ]

    # ---- The work of each event

    @staticmethod
    async def _start(visitor: Visitor) -> AsyncIterator[str]:
        yield "Press Continue, and the model reads the text and goes on."

    @staticmethod
    async def _read(visitor: Visitor, draft: str, times: int) -> AsyncIterator[str]:
        _check_text(draft)
        _check("times", times, 1, _MOST_TIMES)
        done = 0
        async for _ in visitor.read(draft, times):
            done += 1
            yield f"Read {done} of {times} times." if times > 1 else ""
        yield "Read." if times == 1 else f"Read {done} times."

    async def _continue(self, visitor: Visitor, draft: str, count: int, temperature: float) -> AsyncIterator[str]:
        _check_text(draft)
        _check("bytes", count, 1, _MOST_BYTES)
        if draft:
            async for _ in visitor.read(draft):
                yield "Writing …"
        request = GenerateRequest(max_tokens=int(count), temperature=temperature)
        async for _ in visitor.generate(request):
            yield "Writing …"
        yield "The model ended its text; what follows begins a new one." if visitor.has_ended else ""

    @staticmethod
    async def _stop(visitor: Visitor) -> AsyncIterator[str]:
        visitor.stop()
        yield ""

    @staticmethod
    async def _mark(visitor: Visitor) -> AsyncIterator[str]:
        yield f"Marked: {await visitor.mark()}."

    @staticmethod
    async def _rewind(visitor: Visitor, mark: str | None) -> AsyncIterator[str]:
        await visitor.rewind(mark if isinstance(mark, str) else "")
        yield f"Back at mark {mark}."

    @staticmethod
    async def _fork(visitor: Visitor) -> AsyncIterator[str]:
        before = visitor.text.name
        await visitor.fork()
        yield f"{visitor.text.name} is a copy of {before}; both go on from here."

    @staticmethod
    async def _new(visitor: Visitor) -> AsyncIterator[str]:
        visitor.begin()
        yield ""

    @staticmethod
    async def _choose(visitor: Visitor, name: str | None) -> AsyncIterator[str]:
        visitor.choose(name if isinstance(name, str) else "")
        yield ""

    @staticmethod
    async def _learn(visitor: Visitor, learns: bool) -> AsyncIterator[str]:
        await visitor.set_learns(learns is True)
        yield "The model learns from what this text reads." if learns is True else ""

    @staticmethod
    async def _load(visitor: Visitor, content: str, name: str) -> AsyncIterator[str]:
        _check_text(content)
        _check_text(name)
        if content:
            try:
                data = base64.b64decode(content, validate=True)
            except (binascii.Error, ValueError):
                raise ApiError(400, "The file did not arrive whole; try again.") from None
            await visitor.load(data, name[:100])
            yield f"{visitor.text.name} continues {name[:100]}."
        else:
            yield ""

    async def _save(self, request: gr.Request) -> tuple[str, str]:
        try:
            data = await (await self._visitors.get(request.session_hash)).save()
        except Exception as error:
            return "", drawing.draw_note(_message(error), is_error=True)
        return base64.b64encode(data).decode(), drawing.draw_note(f"Saved: {drawing.size(len(data))}.")

    async def _unload(self, request: gr.Request) -> None:
        self._visitors.has_left(request.session_hash)


def _message(error: Exception) -> str:
    if isinstance(error, ValidationError):
        error = value_error(error.errors())
    return error_body(error)[1]["error"]["message"]


def _check_text(value: str) -> None:
    if not isinstance(value, str):
        raise ApiError(400, "The text is not a string.")


def _check(name: str, value: float, least: int, most: int) -> None:
    if not isinstance(value, int | float) or not least <= value <= most or value != int(value):
        raise ApiError(400, f"`{name}` must be a whole number from {least} to {most}.")
