"""Suites of Ouro's evaluation: `ouro_base` is Appendix C, `depth` the tables over R = 1 … 8.

`scaling` has the benchmarks of Appendix D. All three need the Hugging Face hub or a filled cache.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, Table 16, §5.3 and Appendix D.1.

Deviations:
- The paper does not say whether it reports acc or acc_norm. Both are recorded; `metric` follows the
  harness' custom: acc_norm where answers differ in length (ARC, HellaSwag, OpenBookQA, PIQA), acc
  elsewhere.
- The paper grades MMLU-Pro and BBH by "strict match". The harness has no filter of that name for
  them: `custom-extract` and `get-answer` are their only ones. Like the strict match of GSM8K, they
  accept nothing but the phrase "answer is …".
- The authors graded MATH500 with 5 examples and code of their own, HumanEval(+) and MBPP(+) with
  evalplus. Here it is the harness' `minerva_math500`, which has 4 examples, and its own tasks on
  evalplus' data.
- Appendix D states no number of examples; `scaling` uses none. LAMBADA is OpenAI's version.
"""

from titan_loop.evaluation.suites import SuiteTask

OURO_BASE = (
    SuiteTask("mmlu", 5),
    SuiteTask("mmlu_pro", 5, "exact_match,custom-extract"),
    SuiteTask("bbh_cot_fewshot", 3, "exact_match,get-answer"),
    SuiteTask("arc_challenge", 25, "acc_norm,none"),
    SuiteTask("hellaswag", 10, "acc_norm,none"),
    SuiteTask("winogrande", 5),
    SuiteTask("gsm8k_cot", 3, "exact_match,strict-match"),
    SuiteTask("minerva_math500", None, "math_verify,none"),
    SuiteTask("humaneval", 0, "pass@1,create_test"),
    SuiteTask("humaneval_plus", 0, "pass@1,create_test"),
    SuiteTask("mbpp", 3, "pass_at_1,none"),
    SuiteTask("mbpp_plus", 3, "pass_at_1,none"),
)
DEPTH = (
    SuiteTask("arc_challenge", 25, "acc_norm,none"),
    SuiteTask("arc_easy", 8, "acc_norm,none"),
    SuiteTask("commonsense_qa", 10),
    SuiteTask("hellaswag", 10, "acc_norm,none"),
    SuiteTask("mmlu", 5),
    SuiteTask("winogrande", 5),
)
SCALING = (
    SuiteTask("arc_challenge", 0, "acc_norm,none"),
    SuiteTask("arc_easy", 0, "acc_norm,none"),
    SuiteTask("hellaswag", 0, "acc_norm,none"),
    SuiteTask("lambada_openai", 0),
    SuiteTask("openbookqa", 0, "acc_norm,none"),
    SuiteTask("piqa", 0, "acc_norm,none"),
)
