package pattern_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/internal/rules/pattern"
)

// What PCRE has and Go doesn't. integration/doctor compares such patterns with real brokers.
func TestPatternsOfPerl(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		pattern string
		yes, no []string
	}{
		{`^(?!amq\.).*`, []string{"orders", "", "xamq.a"}, []string{"amq.gen-1", "amq."}},
		{`^(?!amq\.)`, []string{"orders"}, []string{"amq.gen-1"}},
		{`^(?!amq\.)(?!.*\.dead$)orders`, []string{"orders", "orders.deadly"}, []string{"orders.dead", "amq.orders"}},
		{`^(?!(amq\.|celery@)).+$`, []string{"a"}, []string{"celery@host", "", "amq.x"}},
		{`^(?=orders)(?=.*eu$)`, []string{"orders.eu"}, []string{"orders.us", "x.orders.eu"}},
		{`^(.*(?<![E|e]rror))?$`, []string{"orders", ""}, []string{"orders_error", "Error"}},
		{`(?<=\.)dead$`, []string{"orders.dead"}, []string{"dead", "ordersdead"}},
		{`(?<!\.)dead$`, []string{"dead", "ordersdead"}, []string{"orders.dead"}},
		{`(?!amq\.).*`, []string{"amq.gen", ""}, nil}, // not anchored: it matches further on
		{`(?i)^(?!AMQ\.)o`, []string{"Orders"}, []string{"amq.o"}},
		{`^(?i:(?!AMQ))a`, []string{"abc"}, []string{"amq", "Abc"}},
		{`^(?>a+)ab`, nil, []string{"aaab"}},
		{`^(?>a|ab)c`, []string{"ac"}, []string{"abc"}},
		{`^a++b`, []string{"aab"}, []string{"b"}},
		{`^a*+a`, nil, []string{"aaa"}},
		{`^(ab|a)?+b`, []string{"b", "abb"}, []string{"ab"}},
		{`^\x61{2,3}+a`, []string{"aaaa"}, []string{"aaa"}},
		{`^[a-c]++\d`, []string{"abc1"}, []string{"abcd1"}},
		{`^(?!a)(?#not a).\Z`, []string{"b"}, []string{"a", "bb"}},
		{`^(?!\Qa.b\E)a.b`, []string{"axb"}, []string{"a.b"}},
		{`^(?!x)(?<kind>a|b){2}?c`, []string{"abc"}, []string{"ac"}},
		{`^(?!x{y)x\{`, nil, []string{"x{y"}},
		{`^(?![[:upper:]])[^]x]`, []string{"a"}, []string{"A", "]", "x"}},
		{`^(?!q)\w+\b.\B`, []string{"ab.."}, []string{"ab"}},
		{`^(?s:(?!\n).)*?$`, []string{"abc"}, []string{"a\nb"}},
		{`^(?m)a$(?!\n)|b(?=c)`, []string{"a", "a\nbc", "xbc"[1:]}, []string{"a\nb"}},
	} {
		_, err := regexp.Compile(tt.pattern)
		assert.Error(t, err, "%s: Go parses it", tt.pattern)
		p := pattern.Compile(tt.pattern)
		for i, names := range [][]string{tt.no, tt.yes} {
			for _, name := range names {
				yes, known := p.Match(name)
				assert.True(t, known, "%s %q", tt.pattern, name)
				assert.Equal(t, i == 1, yes, "%s %q", tt.pattern, name)
			}
		}
	}
}

// The translator and the matcher agree with Go about what Go has: a part that changes nothing
// keeps Go from parsing the pattern itself.
func TestPatternsAgreeWithGo(t *testing.T) {
	t.Parallel()
	names := []string{"", "a", "ab", "abc", "aabbcc", "orders", "orders.eu.1", "ORDERS", "a\nb", "ä.ö", "x{2}", "a b", "a-b_c", "]", "aaaaaaaaaa", "ordersorders"}
	for _, text := range []string{
		"", "a", "^a", "a$", "^$", ".", "^.{3}$", "a|b", "^(a|b)+$", "^(?:a|b)*?c", "[a-c]+", "[^a-c]", `\w+\.\w+`, `\bb`, `^\S+$`, "(?i)orders", "(?i:O)rders", `\d`, "^(orders){2}$", "a{2,}", "^a{0,2}b", `\x61`, `\pL\.`, `(?s).b`, "x{2", "[]]", "^(a?)*$", "(a*)+b", "^((a|b)|c){3}", `[\w.]+$`, `^\Qa-b\E`, "(?U)a+b",
	} {
		plain := regexp.MustCompile(text)
		for _, with := range []string{"(?=)" + text, "(?:" + text + ")(?<!zzz)", "(?!zzz)(?:" + text + ")", "(?=)(" + text + "|zzz)(?=)"} {
			p := pattern.Compile(with)
			for _, name := range names {
				yes, known := p.Match(name)
				assert.True(t, known, "%s %q", with, name)
				assert.Equal(t, plain.MatchString(name), yes, "%s %q", with, name)
			}
		}
	}
}

// What isn't known is neither yes nor no, and costs little.
func TestPatternsThatCantBeTold(t *testing.T) {
	t.Parallel()
	for _, text := range []string{`(a)\1`, `(?R)?`, `(?(1)a|b)`, `a\Kb`, `(?|a|b)`, `(*FAIL)`, `(`, `a)(?!b`, `(?!`, `(?!a`, `[a`, `(?x)(?!a) b`, strings.Repeat("(?=", 100_000), strings.Repeat("(?=a)", 10_000), "(?!" + strings.Repeat("(", 2000), "+", "(?=a", `(?!\`} {
		_, known := pattern.Compile(text).Match("abc")
		assert.False(t, known, "%.40s", text)
	}
	yes, known := pattern.Compile(`^(?!x)(a*)*b$`).Match(strings.Repeat("a", 10_000))
	assert.False(t, known, "it takes too many steps: %v", yes)
}

// FuzzPatterns finds panics, and patterns that take long.
func FuzzPatterns(f *testing.F) {
	f.Add(`^(?!amq\.).*`, "amq.gen")
	f.Add(`(?<=a)b++(?>c|d)`, "abcd")
	f.Add(`(?i-s:a(?!b){2,3}+)|[[:alpha:]]`, "a")
	f.Fuzz(func(t *testing.T, text, name string) {
		yes, known := pattern.Compile(text).Match(name)
		plain, err := regexp.Compile(text)
		if err == nil && (!known || yes != plain.MatchString(name)) {
			t.Fatalf("%q %q", text, name)
		}
	})
}
