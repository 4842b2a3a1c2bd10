import re


def correctness_reward(completions, solution, **kwargs):
    out = []
    for c, s in zip(completions, solution):
        t = c if isinstance(c, str) else c[-1]["content"]
        m = re.findall(r"\\boxed\{([^}]*)\}", t)
        out.append(float(bool(m) and m[-1].strip() == s.strip("$")))
    return out


def load_rewards(config):
    return [correctness_reward]


def boxed_answer(t):
    m = re.findall(r"\\boxed\{([^}]*)\}", t)
    return m[-1] if m else None
