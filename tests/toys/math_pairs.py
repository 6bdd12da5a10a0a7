"""Right answers, what was said in a box, and whether it is right: the cases that graders of mathematics get wrong."""

PAIRS = r"""
e^{16}-1 ;; -1+exp(16) ;; right
\dfrac{\pi}{2} ;; pi/2 ;; right
14 - i ;; 14.0 + -1.0i ;; right
-2\pi ;; -2*pi ;; right
\frac{1}{\sqrt{n}} ;; \sqrt{1/n} ;; right
0.5 ;; \frac12 ;; right
1000 ;; 1,000 ;; right
.5 ;; 50\% ;; right
3 ;; 3 \text{ cm} ;; right
4\sqrt{2} ;; 4 ;; wrong
1/2006! ;; 1/2004! ;; wrong
1/2^{98} ;; 1/2^{99} ;; wrong
1+1/e ;; 1-1/e ;; wrong
4 ;; 4\sqrt{2} ;; wrong
1/2^{99} ;; 1/2^{99} ;; right
\frac{1}{2004!} ;; 1/2004! ;; right
[0, 1) ;; [0,1) ;; right
[0, 1) ;; [0,1] ;; wrong
(0, 1) ;; (0,1) ;; right
(1, 0) ;; (0,1) ;; wrong
(0, 1) ;; [0,1] ;; wrong
(-\infty, 3] ;; (-\infty, 3] ;; right
(-\infty, 3] ;; x \le 3 ;; right
(-\infty,1)\cup(2,\infty) ;; (-\infty,1) \cup (2,\infty) ;; right
(-\infty,1)\cup(2,\infty) ;; (2,\infty) \cup (-\infty,1) ;; right
\{1, 2, 3\} ;; \{3, 1, 2\} ;; right
\{1, 2, 3\} ;; 1, 2, 3 ;; right
\{1, 2, 3\} ;; \{1, 2\} ;; wrong
1, 2, 3 ;; 3, 2, 1 ;; right
\{1,2\} ;; \{1,2,3,4,5\} ;; wrong
(1, 2, 3) ;; (1,2,3) ;; right
(1, 2, 3) ;; (3,2,1) ;; wrong
(1, 2) ;; (2,1) ;; wrong
(1, 2) ;; 1, 2 ;; right
\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix} ;; \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix} ;; right
\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix} ;; \begin{pmatrix}1 & 2\\4 & 3\end{pmatrix} ;; wrong
\begin{pmatrix}1\\2\end{pmatrix} ;; \begin{pmatrix}1 & 2\end{pmatrix} ;; wrong
\frac{3}{4} ;; 0.75 ;; right
\frac{3}{4} ;; 3/4 ;; right
\frac{3}{4} ;; \frac{6}{8} ;; right
\frac{1}{3} ;; 0.333333 ;; right
\frac{1}{3} ;; 0.33 ;; wrong
3/4 ;; \tfrac34 ;; right
25\% ;; 0.25 ;; right
25\% ;; 25 ;; right
25 ;; 25\% ;; right
0.25 ;; 25\% ;; right
0.25 ;; 25 ;; wrong
5 ;; 5\text{ meters} ;; right
5 ;; 5 km/h ;; right
5 ;; \$5 ;; right
5 ;; 5\ \mathrm{m}^2 ;; right
12345 ;; 12{,}345 ;; right
1234567 ;; 1,234,567 ;; right
1000 ;; 1 000 ;; right
1000 ;; 1{,}000 ;; right
1000 ;; 1.000 ;; wrong
1,000 ;; 1000 ;; right
1, 2 ;; 1,2 ;; right
C ;; C ;; right
C ;; (C) ;; right
C ;; \text{C} ;; right
C ;; \textbf{(C)} ;; right
C ;; c ;; right
C ;; D ;; wrong
C ;; C. ;; right
C ;; A, B, C, D, E ;; wrong
E ;; E ;; right
E ;; 2.718281828 ;; wrong
\text{Evelyn} ;; Evelyn ;; right
\text{Evelyn} ;; \text{evelyn} ;; right
\text{Evelyn} ;; \text{Carla} ;; wrong
\text{even} ;; \text{odd} ;; wrong
\text{Navin} ;; \text{Van in} ;; wrong
-5 ;; -5 ;; right
-5 ;; 5 ;; wrong
-5 ;; −5 ;; right
5 ;; +5 ;; right
-\frac{1}{2} ;; \frac{-1}{2} ;; right
-\frac{1}{2} ;; \frac{1}{-2} ;; right
\pm 2 ;; \pm 2 ;; right
\pm 2 ;; 2, -2 ;; right
2, -2 ;; \pm 2 ;; right
\pm 2 ;; 2 ;; wrong
1 \pm \sqrt{2} ;; 1+\sqrt{2}, 1-\sqrt{2} ;; right
1 \pm \sqrt{2} ;; 1+\sqrt{2} ;; wrong
1.5e3 ;; 1500 ;; right
1500 ;; 1.5e3 ;; right
1500 ;; 1.5 \times 10^3 ;; right
1500 ;; 1.5 \cdot 10^{3} ;; right
6.02e23 ;; 6.02 \times 10^{23} ;; right
10^{-7} ;; 2 \times 10^{-7} ;; wrong
1e-7 ;; 2e-7 ;; wrong
0.0000001 ;; 0.0000002 ;; wrong
0 ;; 10^{-9} ;; wrong
0 ;; 0.0000001 ;; wrong
90 ;; 90^\circ ;; right
90^\circ ;; 90 ;; right
90^\circ ;; 90^{\circ} ;; right
90^\circ ;; 90 \text{ degrees} ;; right
90^\circ ;; 45^\circ ;; wrong
2\frac{1}{2} ;; 2.5 ;; right
2\frac{1}{2} ;; \frac{5}{2} ;; right
\frac52 ;; 2\frac{1}{2} ;; right
2\frac{1}{2} ;; 1 ;; wrong
2\frac{1}{2} ;; 2 1/2 ;; right
3 ;; x = 3 ;; right
x = 3 ;; 3 ;; right
x = 3 ;; x=3 ;; right
x = 3 ;; y = 3 ;; wrong
x = 3 ;; x = 4 ;; wrong
3 ;; 3 = x ;; right
x=1,y=2 ;; x = 1, y = 2 ;; right
x=1,y=2 ;; y = 2, x = 1 ;; right
x=1,y=2 ;; x = 2, y = 1 ;; wrong
y = 2x + 1 ;; y = 1 + 2x ;; right
y = 2x + 1 ;; 2x + 1 ;; right
y = 2x + 1 ;; 2x - y + 1 = 0 ;; right
y = 2x + 1 ;; y = 2x - 1 ;; wrong
x^2+2x+1 ;; (x+1)^2 ;; right
x^2+2x+1 ;; (x-1)^2 ;; wrong
\sin^2 x+\cos^2 x ;; 1 ;; right
\sqrt{8} ;; 2\sqrt{2} ;; right
\sqrt{8} ;; 2.83 ;; wrong
\sqrt[3]{27} ;; 3 ;; right
\log_2 8 ;; 3 ;; right
\binom{5}{2} ;; 10 ;; right
5! ;; 120 ;; right
\infty ;; \infty ;; right
\infty ;; -\infty ;; wrong
\emptyset ;; \emptyset ;; right
3+4i ;; 4i+3 ;; right
3+4i ;; 3-4i ;; wrong
1/2 ;; 1/2, 1/3 ;; wrong
4 ;; 4 \text{ or } 5 ;; wrong
4 ;; 4, 5 ;; wrong
4 ;; 3, 4 ;; wrong
4 ;; 4 or 5 ;; wrong
4 ;; 2+2 ;; right
4 ;; \boxed{4} ;; right
42 ;; The answer is 42 ;; wrong
42 ;; 42. ;; right
42 ;; 042 ;; right
42 ;; $42$ ;; right
42 ;; \(42\) ;; right
42 ;; 4 2 ;; wrong
4 ;; 3=4 ;; wrong
4 ;; 4=5 ;; wrong
4 ;; 0\cdot x+4 ;; right
9 ;; 9**2 ;; wrong
81 ;; 9**2 ;; right
11:30 ;; 11:30 ;; right
3:4 ;; 3:4 ;; right
3:4 ;; 4:3 ;; wrong
10101_2 ;; 10101_2 ;; right
10101_2 ;; 10101_3 ;; wrong
10101_2 ;; 21 ;; wrong
0.\overline{3} ;; \frac13 ;; right
5 ;; __import__('os').system('touch x') ;; wrong
5 ;; ().__class__.__bases__ ;; wrong
x_1 ;; x_2 ;; wrong
x ;; |x| ;; wrong
x ;; \sqrt{x^2} ;; wrong
(1, 1/2^{98}) ;; (1, 1/2^{99}) ;; wrong
\{1, 1/2^{98}\} ;; \{1/2^{99}, 1\} ;; wrong
\{1, 1/2^{98}\} ;; \{1/2^{98}, 1\} ;; right
x/2^{98} ;; x/2^{99} ;; wrong
2^{10} ;; 2^10 ;; right
1024 ;; 2**10 ;; right
1024 ;; 2^10 ;; right
2i ;; -2i ;; wrong
\frac{-1+i\sqrt{3}}{2} ;; \frac{-1}{2}+\frac{\sqrt{3}}{2}i ;; right
5 ;; 9**9**9 ;; wrong
2\pi r ;; 2 \pi r ;; right
n(n+1)/2 ;; \frac{n(n+1)}{2} ;; right
100000000000000000001 ;; 100000000000000000000 ;; wrong
100000000000000000001 ;; 1e20 ;; wrong
0.1 ;; 1/10 ;; right
3.14159265 ;; \pi ;; right
\pi ;; 3.14159265 ;; right
\pi ;; 3.14 ;; wrong
7.5\% ;; 7.5 ;; right
7.5\% ;; 75 ;; wrong
12 ;; \text{12} ;; right
12 ;; x ;; wrong
12 ;; 12x ;; wrong
12 ;; 12 \lor 13 ;; wrong
12 ;; 12 \text{ and } 13 ;; wrong
12 ;; 13 = 12 ;; wrong
12 ;; x \ge 12 ;; wrong
12 ;; \pm 12 ;; wrong
12 ;; \mathbb{R} ;; wrong
\infty ;; \frac{1}{0} ;; wrong
\text{June 20} ;; June 20 ;; right
\text{June 20} ;; June 21 ;; wrong
\{(1,2),(3,4)\} ;; (1,2),(3,4) ;; right
(1,2),(3,4) ;; (1,2) ;; wrong
2^{2006} ;; 2^{2007} ;; wrong
2^{99}+1 ;; 2^{99} ;; wrong
\ln 8 ;; 3 \ln 2 ;; right
\sin 2x ;; 2 \sin x \cos x ;; right
f(x)=x^2 ;; x^2 ;; right
f(x)=x^2 ;; f(x) = x^3 ;; wrong
x=\frac{1}{2^{99}} ;; x=\frac{1}{2^{98}} ;; wrong
x=\frac{1}{2^{99}} ;; \frac{1}{2^{98}}=x ;; wrong
x=\frac{1}{2^{99}} ;; x=2^{-99} ;; right
x\le 10^{-20} ;; x\le 10^{-21} ;; wrong
x\le 10^{-20} ;; 10^{-20}\ge x ;; right
y=2x+3 ;; 2x-y+3=0 ;; right
2m ;; 2 ;; wrong
2h ;; 2m ;; wrong
-2m ;; m(-2) ;; right
5 ;; 5 m ;; right
5 ;; 5cm ;; right
5 ;; 5~\text{cm} ;; right
\ln 2 ;; ln 2 ;; right
"""

# (right answer, said, is it right)
TABLE = [
  (gold, said, verdict == "right")
  for gold, said, verdict in (line.split(" ;; ") for line in PAIRS.strip().splitlines())
]
