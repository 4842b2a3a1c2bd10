"""Program in the text of a completion."""


def program_of(completion: str) -> str:
    """Return the program of a completion: its last fenced block of Python after the reasoning, or all of its text.

    "" if the reasoning never ends, or if there are only blocks of other languages.
    """
    text = completion.rpartition("</think>")[2]
    if "<think>" in text:
        return ""
    parts = text.split("```")
    if len(parts) < 3:
        return text.strip() if len(parts) == 1 else ""
    for block in reversed(parts[1::2] if len(parts) % 2 else parts[1:-1:2]):
        language, newline, program = block.partition("\n")
        if newline and language.strip().lower() in ("", "python", "py", "python3"):
            return program.strip("\n")
    return ""
