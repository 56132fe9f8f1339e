"""Transcripts as text, subtitles, tables and JSON."""

import json
from collections.abc import Callable

from tasks.whisper.segments import Segment, Transcript


def _time(seconds: float, *, point: str, hours: bool) -> str:
    """00:00:01,500, where the hours may be left out while there are none."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hour, minute = divmod(minutes, 60)
    front = f"{hour:02d}:" if hours or hour else ""
    return f"{front}{minute:02d}:{second:02d}{point}{thousandths:03d}"


def _line(segment: Segment) -> str:
    """Its text in one line, as no format may have it in several."""
    return " ".join(segment.text.split())


def _span(segment: Segment, *, point: str, hours: bool) -> str:
    return " --> ".join(_time(seconds, point=point, hours=hours) for seconds in (segment.start, segment.end))


def _cue(segment: Segment) -> str:
    return _line(segment).replace("-->", "->")  # which would be taken for times


def _txt(transcript: Transcript) -> str:
    return "".join(f"{_line(segment)}\n" for segment in transcript.segments)


def _srt(transcript: Transcript) -> str:
    cues = enumerate(transcript.segments, start=1)
    return "".join(f"{at}\n{_span(one, point=',', hours=True)}\n{_cue(one)}\n\n" for at, one in cues)


def _vtt(transcript: Transcript) -> str:
    cues = (f"{_span(one, point='.', hours=False)}\n{_cue(one)}\n\n" for one in transcript.segments)
    return "".join(["WEBVTT\n\n", *cues])


def _tsv(transcript: Transcript) -> str:
    rows = (f"{round(1000 * one.start)}\t{round(1000 * one.end)}\t{_line(one)}\n" for one in transcript.segments)
    return "".join(["start\tend\ttext\n", *rows])


def _json(transcript: Transcript) -> str:
    """With the names of openai-whisper, which others read."""
    segments = []
    for index, one in enumerate(transcript.segments):
        fields = {
            "id": index,
            "start": round(one.start, 3),
            "end": round(one.end, 3),
            "text": one.text,
            "tokens": one.tokens,
            "temperature": one.temperature,
            "avg_logprob": one.mean_log_prob,
            "compression_ratio": one.compression_ratio,
            "no_speech_prob": one.no_speech,
        }
        if one.words is not None:
            fields["words"] = [
                {"word": word.text, "start": word.start, "end": word.end, "probability": word.probability}
                for word in one.words
            ]
        segments.append(fields)
    data = {
        "text": transcript.text,
        "language": transcript.language,
        "duration": transcript.seconds,
        "segments": segments,
    }
    return json.dumps(data, ensure_ascii=False, indent=1) + "\n"


FORMATS: dict[str, Callable[[Transcript], str]] = {"txt": _txt, "srt": _srt, "vtt": _vtt, "tsv": _tsv, "json": _json}
"""How a transcript is written, by the ending of the file."""
