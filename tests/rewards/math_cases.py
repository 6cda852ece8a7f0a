"""Final answers and references, one pair a line, by kind.

An answer stands left of the "~", the reference right of it. What belongs to the
grader's edge, such as what it does not accept although some would, is here too.
"""

_EQUAL = {
  "fractions": r"""
    \frac{1}{2} ~ \frac{1}{2}
    \dfrac{1}{2} ~ \frac{1}{2}
    \tfrac12 ~ 1/2
    \frac12 ~ 0.5
    \frac{2}{4} ~ \frac{1}{2}
    1/2 ~ \frac{1}{2}
    \frac{1}{2} ~ 1/2
    -\frac{1}{2} ~ \frac{-1}{2}
    -\frac{1}{2} ~ \frac{1}{-2}
    -1/2 ~ -0.5
    \left(\frac{1}{2}\right) ~ \frac{1}{2}
    \frac{1}{2} ~ 50\%
    \frac{10}{2} ~ 5
    3\frac{1}{2} ~ \frac{7}{2}
    3 1/2 ~ 3.5
    3\,\frac{1}{2} ~ 7/2
    -3\frac{1}{2} ~ -3.5
    2\tfrac{1}{3} ~ \frac{7}{3}
  """,
  "thousands": r"""
    1,234 ~ 1234
    1234 ~ 1,234
    1{,}234 ~ 1234
    1\,234 ~ 1234
    1 234 ~ 1234
    1,234,567.89 ~ 1234567.89
    12{,}345{,}678 ~ 12345678
  """,
  "decimals": r"""
    0.5 ~ 1/2
    .5 ~ \frac12
    0.50 ~ 0.5
    5.0 ~ 5
    3. ~ 3
    007 ~ 7
    0.333333 ~ 1/3
    0.3333333333 ~ \frac{1}{3}
    0.666667 ~ 2/3
    0.\overline{3} ~ 1/3
    0.1\overline{6} ~ \frac{1}{6}
    0{,}125 ~ \frac18
  """,
  "percentages": r"""
    50\% ~ 50
    50\% ~ 0.5
    50 ~ 50\%
    0.5 ~ 50\%
    50% ~ 50\%
    50 percent ~ 50
    50\text{ percent} ~ 50\%
    12.5\% ~ \frac{1}{8}
  """,
  "wrappers": r"""
    \text{42} ~ 42
    \textbf{42} ~ 42
    \mathbf{42} ~ 42
    \mathrm{42} ~ 42
    {42} ~ 42
    $42$ ~ 42
    \(42\) ~ 42
    42. ~ 42
    +42 ~ 42
    −7 ~ -7
    -7 ~ −7
  """,
  "currency": r"""
    \$18 ~ 18
    $18 ~ 18
    \$18.00 ~ 18
    18 ~ \$18
    18 dollars ~ 18
    18\text{ dollars} ~ \$18
    \$1,234.50 ~ 1234.5
    €20 ~ 20
    -\$5 ~ -5
  """,
  "names": r"""
    x=5 ~ 5
    5 ~ x=5
    x = 5 ~ x=5
    x=5 ~ 5 = x
    y = \frac{1}{2} ~ 0.5
    \theta=30^\circ ~ 30
    f(x)=x^2 ~ x^2
    f(2) = 7 ~ 7
    a_1 = 3 ~ 3
    \angle ABC = 40^\circ ~ 40
    2+3=5 ~ 5
    x = 2+3 = 5 ~ 5
    A = \pi r^2 ~ \pi r^2
    x \approx 3.14 ~ 3.14
    x_1 = 1, x_2 = 2 ~ 1, 2
    x=1 \text{ or } x=2 ~ 1, 2
    x=1, 2 ~ \{1,2\}
  """,
  "tuples": r"""
    (1,2) ~ (1,2)
    ( 1 , 2 ) ~ (1,2)
    \left(1, 2\right) ~ (1,2)
    1, 2 ~ (1,2)
    (0.5, 2) ~ (\frac12, 2)
    (1,2,3) ~ (1,2,3)
    \left( 3, \frac{\pi}{2} \right) ~ (3,\frac{\pi}{2})
    \langle 1,2\rangle ~ (1,2)
    (x,y)=(1,2) ~ (1,2)
    (1,234) ~ (1,234)
    (1,000, 2,000) ~ (1000, 2000)
  """,
  "sets_and_lists": r"""
    \{1,2,3\} ~ \{3,2,1\}
    1,2,3 ~ \{3,1,2\}
    3,1,2 ~ 1,2,3
    \{1,2,2\} ~ \{1,2\}
    \left\{1, \frac12\right\} ~ \{0.5, 1\}
    \lbrace 1,2\rbrace ~ \{1,2\}
    1 \text{ and } 2 ~ 1,2
    1 and 2 ~ 2, 1
    \pm 3 ~ 3,-3
    -3, 3 ~ \pm 3
    2 \pm \sqrt{3} ~ 2+\sqrt3, 2-\sqrt3
    \{\} ~ \emptyset
    \emptyset ~ \varnothing
  """,
  "intervals": r"""
    [1,2) ~ [1,2)
    \left[1, 2\right) ~ [1,2)
    (-\infty, 3] ~ (-\infty,3]
    x \in [1,2] ~ [1,2]
    [0.5,2] ~ [\frac12,2]
    1 \le x \le 2 ~ [1,2]
    1 \leq x < 2 ~ [1,2)
    x > 3 ~ (3,\infty)
    x \ge 3 ~ 3 \le x
    3 < x ~ x > 3
    x<1 \text{ or } x>3 ~ (-\infty,1)\cup(3,\infty)
    (3,\infty)\cup(-\infty,1) ~ (-\infty,1)\cup(3,\infty)
    (-\infty, \infty) ~ (-\infty,+\infty)
    \mathbb{R}\setminus\{1\} ~ \mathbb{R} \setminus \{1\}
  """,
  "units": r"""
    5 \text{ cm} ~ 5
    5\text{cm} ~ 5 \text{ centimeters}
    5 cm ~ 5
    5\ \mathrm{cm}^2 ~ 5
    12 \text{ cm}^2 ~ 12\text{ square centimeters}
    90^\circ ~ 90
    90^{\circ} ~ 90 \text{ degrees}
    90° ~ 90^\circ
    90 ~ 90^\circ
    42 apples ~ 42
    42 \text{ red apples} ~ 42
    60 km/h ~ 60
    60\text{ km/h} ~ 60 \text{ kilometers per hour}
    60 miles per hour ~ 60\text{ mph}
    9.8\ \text{m/s}^2 ~ 9.8
    9\pi \text{ cm}^2 ~ 9\pi
    2\sqrt{3}\text{ units} ~ 2\sqrt3
    \frac{3}{4} \text{ hours} ~ 0.75
  """,
  "choices": r"""
    C ~ C
    (C) ~ C
    \text{C} ~ C
    \text{(C)} ~ C
    \textbf{(C)} ~ \text{C}
    \textbf{(C) } 42 ~ C
    C. ~ C
    C) 42 ~ (C)
    c ~ C
    Option C ~ C
    C: Paris ~ C
    \text{(A) } 5 ~ A
  """,
  "words": r"""
    Evelyn ~ \text{Evelyn}
    \text{evelyn} ~ \text{Evelyn}
    \text{even} ~ even
    Yes ~ \text{yes}
    True ~ true
    \text{Alice and Bob} ~ \text{Bob and Alice}
    3:30 ~ 3:30
  """,
  "large_integers": r"""
    123456789012345678901234567890 ~ 123456789012345678901234567890
    123,456,789,012,345,678,901 ~ 123456789012345678901
    2^{100} ~ 1267650600228229401496703205376
    1267650600228229401496703205376 ~ 2^{100}
    10^{20} ~ 100000000000000000000
    10^3 ~ 1000
    20! ~ 2432902008176640000
    \binom{5}{2} ~ 10
  """,
  "scientific": r"""
    1.5\times 10^3 ~ 1500
    1.5 \times 10^{3} ~ 1500
    1.5e3 ~ 1500
    1.5 \cdot 10^{-3} ~ 0.0015
    6.02\times10^{23} ~ 6.02e23
    3 \times 10^8 ~ 300000000
  """,
  "matrices": r"""
    \begin{pmatrix}1\\2\end{pmatrix} ~ (1,2)
  """,
  "expressions": r"""
    \frac{\sqrt{3}}{2} ~ \frac{\sqrt3}{2}
    \sqrt{12} ~ 2\sqrt{3}
    \frac{1}{\sqrt{2}} ~ \frac{\sqrt{2}}{2}
    \sqrt 2 ~ \sqrt{2}
    1.4142135 ~ \sqrt{2}
    3.14159265 ~ \pi
    3.14159265358979323846 ~ \pi
    \frac{\pi}{2} ~ 0.5\pi
    \pi/2 ~ \frac{\pi}{2}
    2π ~ 2\pi
    √2 ~ \sqrt{2}
    \sqrt[3]{8} ~ 2
    \sqrt{16} ~ 4
    e^{2} ~ e^2
    \ln 4 ~ 2\ln 2
    \log_2 8 ~ 3
    \sin 30^\circ ~ 0.5
    \cos\frac{\pi}{3} ~ \frac12
    (x+1)^2 ~ x^2+2x+1
    x^2+2x+1 ~ 1+2x+x^2
    2(x+1) ~ 2x+2
    \frac{x+1}{2} ~ \frac{x}{2}+\frac12
    x\cdot y ~ xy
    x*y ~ yx
    R^2-r^2 ~ (R-r)(R+r)
    \frac{n(n+1)}{2} ~ \frac{n^2+n}{2}
    \sin^2 x+\cos^2 x ~ 1
    3+4i ~ 4i+3
    (1+i)^2 ~ 2i
    x_1+x_2 ~ x_2+x_1
    |x-1| ~ |1-x|
    \frac{x^2-1}{x-1} ~ x+1
    2^{n+1} ~ 2\cdot 2^n
  """,
  "relations": r"""
    y=2x+3 ~ y = 2x + 3
    2x+3 ~ y=2x+3
    y=2x+3 ~ 2x-y+3=0
    x^2+y^2=4 ~ y^2 + x^2 = 4
    2x+2y=4 ~ x+y=2
    x^2+y^2\le 4 ~ 4 \ge x^2+y^2
    2x+3y<6 ~ 6>3y+2x
  """,
  "others": r"""
    0.25 \text{ or } \frac14 ~ 1/4
    x = 2 \text{ and } y = 3 ~ (2,3)
    P(x)=x^2 ~ x^2
    f(x) = 2x+1 ~ f(x)=1+2x
    x \in (-\infty, 2) \cup (3, \infty) ~ (-\infty,2)\cup(3,\infty)
    2^{10} ~ 1024
    12:30 \text{ PM} ~ 12:30
    0 ~ 0
    5 million ~ 5,000,000
    5 \text{ million dollars} ~ \$5{,}000{,}000
    2.5\text{ thousand} ~ 2500
    5^{\text{th}} ~ 5
    5th ~ 5
    21^{st} ~ 21
    \frac{1.5}{2} ~ 0.75
    1,000\pi ~ 1000\pi
    \frac{\pi}{6} \text{ radians} ~ \frac{\pi}{6}
    \text{No solution} ~ no solution
    \infty ~ \infty
    25\,\% ~ 25\%
    -0 ~ 0
    2516_8 ~ 2516_{8}
    1/3 ~ 0.333333333
    7 \text{ hours } ~ 7
    m\angle A = 50 ~ 50^\circ
    5^{\circ}\text{C} ~ 5
    \displaystyle \frac{1}{2} ~ 0.5
    \frac{a}{b} ~ a/b
    \frac{1}{2}x ~ x/2
    100\pi ~ 100 \pi
    11\sqrt2 ~ 11 \sqrt{2}
    -x^2 ~ -(x^2)
    \sqrt{x^2} ~ |x|
    \tan^{-1} 1 ~ \frac{\pi}{4}
  """,
}

_DIFFERENT = {
  "fractions": r"""
    \frac{1}{3} ~ \frac{1}{2}
    \frac{2}{1} ~ \frac{1}{2}
    3\frac{1}{2} ~ \frac{3}{2}
  """,
  "decimals": r"""
    0.33 ~ 1/3
    0.3334 ~ 1/3
  """,
  "thousands": r"""
    1,235 ~ 1234
    12,34 ~ 1234
    0.05 ~ 1/2
  """,
  "percentages": r"""
    5\% ~ 50
    0.5\% ~ 50
    0.5\% ~ 50\%
    500\% ~ 50
  """,
  "wrappers": r"""
    43 ~ 42
    \text{43} ~ 42
    -42 ~ 42
    4 2 ~ 42
  """,
  "currency": r"""
    \$19 ~ 18
    \$18 ~ €18
    18 cents ~ \$18
  """,
  "names": r"""
    x=6 ~ 5
    y=5 ~ x=5
    2+3=6 ~ 5
    4=5 ~ 5
  """,
  "tuples": r"""
    (2,1) ~ (1,2)
    2, 1 ~ (1,2)
    (1,2,3) ~ (1,2)
    (1,2) ~ (1,2,3)
    (1,2) ~ \{1,2\}
  """,
  "sets_and_lists": r"""
    \{1,2\} ~ (1,2)
    \{1,2\} ~ \{1,2,3\}
    \{1,2,3\} ~ \{1,2\}
    \{1,3\} ~ \{1,2\}
    3 ~ \pm 3
    1 ~ 1, 2
    1,2,3 ~ 2
    1 or 2 ~ 1
    \{1,2\} ~ 1
  """,
  "intervals": r"""
    [1,2] ~ (1,2)
    (1,2] ~ [1,2]
    (1,2) ~ [1,2)
    [1,3] ~ [1,2]
    x \ge 3 ~ x > 3
    x < 3 ~ x > 3
    x > 3 ~ [3,\infty)
    1 < x < 2 ~ [1,2]
    (-\infty,1)\cup(3,\infty) ~ (-\infty,1]\cup(3,\infty)
    (-\infty,1) ~ (-\infty,1)\cup(3,\infty)
  """,
  "units": r"""
    5 \text{ cm} ~ 5 \text{ m}
    5 \text{ cm} ~ 5 \text{ cm}^2
    6 \text{ cm} ~ 5 \text{ cm}
    91^\circ ~ 90
  """,
  "choices": r"""
    D ~ C
    (D) ~ C
    A ~ C
    A, C ~ C
    C or D ~ C
    (C) (D) ~ C
    C. D. ~ C
    (C) or (D) ~ C
  """,
  "words": r"""
    \text{odd} ~ \text{even}
    Evelyn ~ Eveyln
    No ~ Yes
  """,
  "large_integers": r"""
    123456789012345678901234567891 ~ 123456789012345678901234567890
    2^{100} ~ 1267650600228229401496703205377
  """,
  "scientific": r"""
    1.5\times 10^4 ~ 1500
    1.5e2 ~ 1500
    1.5 \times 10^{-3} ~ 1500
    1.51\times10^3 ~ 1500
  """,
  "matrices": r"""
    \begin{pmatrix}1&2\\3&5\end{pmatrix} ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
    \begin{pmatrix}1&3\\2&4\end{pmatrix} ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
    \begin{pmatrix}1&2\end{pmatrix} ~ \begin{pmatrix}1\\2\end{pmatrix}
  """,
  "expressions": r"""
    \frac{\sqrt{3}}{2} ~ \frac{\sqrt{2}}{2}
    \sqrt{2} ~ 2
    1.414 ~ \sqrt{2}
    3.14 ~ \pi
    \pi ~ 3.14
    \sqrt{x^2} ~ x
    (x+1)^2 ~ x^2+1
    x^2+2x+1 ~ x^2+2x+2
    R^2-r^2 ~ 0
    5x ~ 5
    2xy ~ 2
    x' ~ x
    3-4i ~ 3+4i
  """,
  "relations": r"""
    y=2x+4 ~ y=2x+3
    2x-3 ~ y=2x+3
    x+y=3 ~ x+y=2
    2x+3y>6 ~ 2x+3y<6
    2x+3y\le 6 ~ 2x+3y<6
  """,
  "others": r"""
    2516 ~ 2516_8
    0.25 \text{ or } \frac13 ~ 1/4
    x = 3 \text{ and } y = 2 ~ (2,3)
    5 million ~ 5
    5 billion ~ 5 million
    2 thirds ~ 2
    2\text{ hundredths} ~ 2
    f(x) = 2x+2 ~ f(x)=1+2x
    12:31 ~ 12:30
    A = 5 ~ 6
    5^{\circ}\text{C} ~ 5^\circ\text{F}
    2516_9 ~ 2516_8
    0.0000001 ~ 0.0000002
    1.2345678 ~ 1.2345679
    10^{-7} ~ 2\times 10^{-7}
    12 34 ~ 46
    \frac{1}{0} ~ \frac{2}{0}
    42 or 43 ~ 42
    42 \text{ or } 43 ~ 42
    \text{not } 42 ~ 42
    42 is wrong ~ 42
    {} ~ 42
    ? ~ 42
    \boxed{} ~ 42
    \sin 30 ~ \sin 30^\circ
    10**10**10 ~ 10
    \frac{2}{3} ~ \frac{3}{2}
    3 \times 10^8 ~ 3 \times 10^9
    2^{n+1} ~ 2^n
    e^3 ~ e^2
    \text{Bob} ~ \text{Alice and Bob}
    1267650600228229401496703205376 ~ 2^{101}
    (1,234) ~ 1234
  """,
}


def _pairs(text: str) -> list[tuple[str, str]]:
  lines = text.strip().splitlines()
  return [tuple(part.strip() for part in line.split("~")) for line in lines]


# {kind: [(answer, reference)]}
EQUAL = {kind: _pairs(text) for kind, text in _EQUAL.items()}
DIFFERENT = {kind: _pairs(text) for kind, text in _DIFFERENT.items()}
