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
    blocks = [block.partition("\n") for block in (parts[1::2] if len(parts) % 2 else parts[1:-1:2])]
    named = [(language.strip().lower(), program) for language, newline, program in blocks if newline]
    # A block without a name may be an example of the output.
    for languages in (("python", "py", "python3"), ("",)):
        if found := [program for language, program in named if language in languages]:
            return found[-1].strip("\n")
    return ""
