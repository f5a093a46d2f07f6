"""Texts on which unequal tokenizers differ: every script, numbers, white space, code.

They depend on nothing but the version of Unicode that this Python knows.
"""

import random
import unicodedata
from collections.abc import Iterator
from functools import cache

_SENTENCES = (
    "All human beings are born free and equal in dignity and rights.",
    "Tous les êtres humains naissent libres et égaux en dignité et en droits.",
    "Alle Menschen sind frei und gleich an Würde und Rechten geboren, größer als 3,50 €.",
    "Todos los seres humanos nacen libres e iguales; ¿no es así? ¡Sí, señor!",
    "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw.",
    "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar. İstanbul'da ılık.",
    "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền lợi.",
    "Все люди рождаются свободными и равными в своём достоинстве и правах.",
    "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια.",
    "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق، وعددهم ١٢٣٤٥.",
    "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם.",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है। १२३४",
    "সমস্ত মানুষ স্বাধীনভাবে সমান মর্যাদা এবং অধিকার নিয়ে জন্মগ্রহণ করে।",
    "மனிதப் பிறவியினர் சகலரும் சுதந்திரமாகவே பிறக்கின்றனர்.",
    "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
    "人人生而自由，在尊严和权利上一律平等。共12345人！",
    "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。カタカナ",
    "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "ყველა ადამიანი იბადება თავისუფალი და თანასწორი. Բոլոր մարդիկ ծնվում են ազատ:",
)
_LINES = (
    "I'll DON'T they've It'S we'd you're 'tis O'Neil's rock'n'roll 'LL 's'S",
    "a 12 345 6789 3.14 1,000,000 0x1F 1e-9 12345678 ½ ² Ⅳ ٣٤ 2026-11-28 3rd v2",
    "  two\t\tspaces  \n\n\n next\r\nline \u00a0 \u3000 end   \n",
    "\n" * 17 + " " * 70 + "\t" * 9 + "x" + " " * 3,
    "camelCase HTTPServer XMLHttpRequest2 snake_case ÀÉÎõü ǅ ΑΒγδ АБвг straßeSTRASSE",
    "$x != @y; //-->> {}[]()<> #!/bin/sh ~~~ ...…—— a/b/ \\n `q` |p| x+=1; ***\n\n///\n",
    "🙂👩‍👩‍👧‍👦🇫🇷 ‮abc‬ \u200b a\x00b \ufeffBOM ﬁ ﷺ e\u0301\u0302 \u1100\u1161",
    "<|endoftext|> <s> </s> [INST] <|im_start|>user",
    "def f(x: int) -> str:\n    return f'{x:>8}' if x else \"no\"  # 100 %\n\n\nclass A:\n\tpass\n",
)
_SPACES = (" ", "  ", "\t", "\n", "\r\n", "\n\n", "\u00a0")
_WORDS = "a b the A THE é É ß ǅ ʰ я Я 漢 字 か カ 한 ا ก क \u0301 \u093e 7 42 2026 ٣ ½ Ⅳ"
_SIGNS = ". , - ' 's 'LL \" ( ) / _ $ + 。 ， — € 🙂 \u200d \u200b \x00 !! # \\"
_PIECES = (*_SPACES, *_WORDS.split(" "), *_SIGNS.split(" "))
_RANDOM = 600


def _blocks() -> Iterator[str]:
    """Yield words of every block of 64 code points: letters, marks, cases and signs mixed."""
    for start in range(0x80, 0x1F800, 64):
        block = [chr(code) for code in range(start, start + 64)]
        # Private ones, and those that one library's tables may not know yet, say nothing.
        known = [c for c in block if unicodedata.category(c) not in ("Cn", "Cs", "Co")][::5]
        if known:
            yield f"{''.join(known[:6])} a{''.join(known[6:])}1"


@cache
def stress_texts() -> tuple[str, ...]:
    """Return the texts, the same ones every time; some are not in Unicode's normal form C."""
    draw = random.Random(0)
    mixed = ("".join(draw.choices(_PIECES, k=12)) for _ in range(_RANDOM))
    apart = (unicodedata.normalize("NFD", text) for text in _SENTENCES)
    texts = (*_SENTENCES, *_LINES, *apart, *_blocks(), *mixed)
    return tuple(dict.fromkeys(texts))
