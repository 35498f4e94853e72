// Package pattern matches names against the patterns of policies. RabbitMQ evaluates these with
// PCRE, Perl's regular expressions. Go's don't have look-around assertions, atomic groups, and
// possessive quantifiers, and charts and operators use them: ^(?!amq\.) is the usual pattern of a
// policy for everything but the broker's own queues.
//
// A pattern that Go parses is Go's. Any other one is translated into a syntax tree of Go's in
// which marked groups stand for what Go lacks, and matched by backtracking, with a bound. What
// can't be translated, such as a back reference, matches neither yes nor no.
package pattern

import (
	"regexp"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	// maxSteps bounds the work for one name. PCRE has such a bound, too.
	maxSteps = 50_000
	// maxLength and maxDepth bound what is translated.
	maxLength = 16 << 10
	maxDepth  = 50
)

// Pattern is a compiled pattern. It is safe for concurrent use.
type Pattern struct {
	plain *regexp.Regexp // nil if Go can't parse it
	tree  *syntax.Regexp // nil if it can't be translated either
	marks []mark
}

// mark is a construct that Go lacks. The tree has an empty group in its place.
type mark struct {
	kind kind
	body *syntax.Regexp
}

type kind int

const (
	ahead kind = iota
	notAhead
	behind
	notBehind
	atomic
)

// markName begins the names of the groups that stand for marks.
const markName = "hopbackMark"

// Compile compiles a pattern. It has no error: see [Pattern.Match].
func Compile(text string) *Pattern {
	p := &Pattern{}
	if p.plain, _ = regexp.Compile(text); p.plain != nil || len(text) > maxLength || strings.Contains(text, markName) {
		return p
	}
	t := &translator{text: text}
	out, ok := t.sequence("", 0)
	if ok && t.at == len(text) {
		p.tree, _ = syntax.Parse(out, syntax.Perl)
		p.marks = t.marks
	}
	return p
}

// Exact reports whether Go parses the pattern, so that Match always knows.
func (p *Pattern) Exact() bool { return p.plain != nil }

// Match reports whether the pattern matches anywhere in a name. known is false if that can't be
// told: the pattern has a construct that isn't translated, or needs too many steps.
func (p *Pattern) Match(name string) (yes, known bool) {
	switch {
	case p.plain != nil:
		return p.plain.MatchString(name), true
	case p.tree == nil:
		return false, false
	}
	m := &matcher{p: p, in: []rune(name)}
	for at := 0; at <= len(m.in) && !yes && m.steps <= maxSteps; at++ {
		yes = m.match(p.tree, at, func(int) bool { return true })
	}
	return yes, m.steps <= maxSteps
}

// translator turns a pattern into Go's syntax.
type translator struct {
	text  string
	at    int
	marks []mark
}

// mark adds a construct, whose body is in Go's syntax, and returns the group that stands for it.
func (t *translator) mark(k kind, body, flags string) (string, bool) {
	if flags != "" {
		body = "(?" + flags + ")" + body
	}
	tree, err := syntax.Parse(body, syntax.Perl)
	if err != nil {
		return "", false
	}
	t.marks = append(t.marks, mark{k, tree})
	return "(?P<" + markName + strconv.Itoa(len(t.marks)-1) + ">)", true
}

var (
	opening = regexp.MustCompile(`^\((\?([imsU]*)(-[imsU]+)?:|\?P?<[A-Za-z_]\w*>)?`)
	setting = regexp.MustCompile(`^\(\?([imsU]*)(-[imsU]+)?\)`)
	counted = regexp.MustCompile(`^\{\d+(,\d*)?\}`)
	class   = regexp.MustCompile(`^\[\^?\]?(\[:\^?[a-z]+:\]|\\[^QE]|[^\]\\])*\]`)
	escape  = regexp.MustCompile(`(?s)^\\(x[0-9A-Fa-f]{2}|x\{[0-9A-Fa-f]+\}|[pP]\{[^}]*\}|[pP][A-Z]|[0-7]{2,3}|.)`)
	quote   = regexp.MustCompile(`(?s)^\\Q(.*?)(\\E|$)`)
	comment = regexp.MustCompile(`^\(\?#[^)]*\)`)
)

var constructs = []struct {
	text string
	kind kind
}{{"(?=", ahead}, {"(?!", notAhead}, {"(?<=", behind}, {"(?<!", notBehind}, {"(?>", atomic}}

// escapes are those that Go doesn't have.
var escapes = map[string]string{`\Z`: `(?:\n?\z)`, `\h`: `[ \t]`, `\H`: `[^ \t]`, `\N`: `[^\n]`, `\e`: `\x1b`}

// sequence translates up to the end of a group or of the text. flags are the options that are
// set, such as "i".
func (t *translator) sequence(flags string, depth int) (out string, ok bool) {
	if depth > maxDepth {
		return "", false
	}
	atom := -1 // where the last atom begins in out; -1 for none
	for t.at < len(t.text) && t.text[t.at] != ')' {
		rest := t.text[t.at:]
		switch q := counted.FindString(rest); {
		case rest[0] == '*' || rest[0] == '+' || rest[0] == '?' || q != "":
			if q == "" {
				q = rest[:1]
			}
			t.at += len(q)
			after := t.text[t.at:]
			switch {
			case !strings.HasPrefix(after, "+"):
				out += q
			case atom < 0:
				return "", false
			default: // possessive: it is an atomic group around the atom
				t.at++
				group, good := t.mark(atomic, out[atom:]+q, flags)
				if !good {
					return "", false
				}
				out = out[:atom] + group
			}
			if strings.HasPrefix(after, "?") { // lazy
				t.at++
				out += "?"
			}
			continue
		case setting.MatchString(rest):
			found := setting.FindStringSubmatch(rest)
			flags = changed(flags, found[1], found[2])
			t.at += len(found[0])
			out, atom = out+found[0], -1
			continue
		case comment.MatchString(rest):
			t.at += len(comment.FindString(rest))
			continue
		case rest[0] == '|':
			t.at++
			out, atom = out+"|", -1
			continue
		}
		piece, good := t.atom(rest, flags, depth)
		if !good {
			return "", false
		}
		atom = len(out)
		out += piece
	}
	return out, true
}

// atom translates one atom: a group, a class, an escape, or a character.
func (t *translator) atom(rest, flags string, depth int) (out string, ok bool) {
	group := func(open string, flags string) (string, bool) {
		t.at += len(open)
		body, ok := t.sequence(flags, depth+1)
		if !ok || t.at >= len(t.text) {
			return "", false
		}
		t.at++ // the closing parenthesis
		return body, true
	}
	for _, c := range constructs {
		if strings.HasPrefix(rest, c.text) {
			body, ok := group(c.text, flags)
			if !ok {
				return "", false
			}
			return t.mark(c.kind, body, flags)
		}
	}
	if found := opening.FindStringSubmatch(rest); found != nil {
		body, ok := group(found[0], changed(flags, found[2], found[3]))
		return found[0] + body + ")", ok
	}
	if found := quote.FindStringSubmatch(rest); found != nil {
		t.at += len(found[0])
		return "(?:" + regexp.QuoteMeta(found[1]) + ")", true
	}
	for _, re := range []*regexp.Regexp{class, escape} {
		if found := re.FindString(rest); found != "" {
			t.at += len(found)
			if other, has := escapes[found]; has {
				found = other
			}
			return found, true
		}
	}
	if rest[0] == '[' {
		return "", false
	}
	_, size := utf8.DecodeRuneInString(rest)
	t.at += size
	if rest[0] == '{' {
		return `\{`, true // PCRE reads one that begins no quantifier as itself, as Go does
	}
	return rest[:size], true
}

// changed is a set of options after some are switched on, and others off.
func changed(flags, on, off string) string {
	var set []byte
	for i := range len(flags + on) {
		c := (flags + on)[i]
		if !slices.Contains(set, c) && !strings.ContainsRune(off, rune(c)) {
			set = append(set, c)
		}
	}
	return string(set)
}

// matcher matches one name.
type matcher struct {
	p     *Pattern
	in    []rune
	steps int
}

// match reports whether re matches from a place on so that next accepts where it ends.
func (m *matcher) match(re *syntax.Regexp, at int, next func(int) bool) bool {
	if m.steps++; m.steps > maxSteps {
		return false
	}
	lazy := re.Flags&syntax.NonGreedy != 0
	switch re.Op {
	case syntax.OpEmptyMatch:
		return next(at)
	case syntax.OpLiteral:
		for i, r := range re.Rune {
			if at+i >= len(m.in) || !same(r, m.in[at+i], re.Flags&syntax.FoldCase != 0) {
				return false
			}
		}
		return next(at + len(re.Rune))
	case syntax.OpCharClass, syntax.OpAnyChar, syntax.OpAnyCharNotNL:
		return at < len(m.in) && contains(re, m.in[at]) && next(at+1)
	case syntax.OpBeginLine, syntax.OpEndLine, syntax.OpBeginText, syntax.OpEndText, syntax.OpWordBoundary, syntax.OpNoWordBoundary:
		return m.holds(re.Op, at) && next(at)
	case syntax.OpCapture:
		if n, ok := strings.CutPrefix(re.Name, markName); ok {
			i, _ := strconv.Atoi(n)
			return m.mark(m.p.marks[i], at, next)
		}
		return m.match(re.Sub[0], at, next)
	case syntax.OpStar:
		return m.repeat(re.Sub[0], 0, -1, lazy, at, next)
	case syntax.OpPlus:
		return m.repeat(re.Sub[0], 1, -1, lazy, at, next)
	case syntax.OpQuest:
		return m.repeat(re.Sub[0], 0, 1, lazy, at, next)
	case syntax.OpRepeat:
		return m.repeat(re.Sub[0], re.Min, re.Max, lazy, at, next)
	case syntax.OpConcat:
		return m.concat(re.Sub, at, next)
	case syntax.OpAlternate:
		return slices.ContainsFunc(re.Sub, func(sub *syntax.Regexp) bool { return m.match(sub, at, next) })
	}
	return false // OpNoMatch
}

func (m *matcher) concat(subs []*syntax.Regexp, at int, next func(int) bool) bool {
	if len(subs) == 0 {
		return next(at)
	}
	return m.match(subs[0], at, func(end int) bool { return m.concat(subs[1:], end, next) })
}

// repeat matches re at least least times, and at most so often; -1 is without end.
func (m *matcher) repeat(re *syntax.Regexp, least, most int, lazy bool, at int, next func(int) bool) bool {
	once := func() bool {
		if most == 0 {
			return false
		}
		return m.match(re, at, func(end int) bool {
			if end == at && least <= 0 {
				return false // another round without progress
			}
			return m.repeat(re, least-1, max(most-1, -1), lazy, end, next)
		})
	}
	switch {
	case least > 0:
		return once()
	case lazy:
		return next(at) || once()
	}
	return once() || next(at)
}

func (m *matcher) mark(k mark, at int, next func(int) bool) bool {
	end := -1
	switch k.kind {
	case ahead, notAhead, atomic:
		m.match(k.body, at, func(e int) bool { end = e; return true })
	case behind, notBehind:
		for from := at; from >= 0 && end < 0 && m.steps <= maxSteps; from-- {
			m.match(k.body, from, func(e int) bool {
				if e == at {
					end = e
				}
				return e == at
			})
		}
	}
	switch k.kind {
	case notAhead, notBehind:
		return end < 0 && next(at)
	case atomic:
		return end >= 0 && next(end)
	}
	return end >= 0 && next(at)
}

// holds reports whether an assertion without a body holds at a place.
func (m *matcher) holds(op syntax.Op, at int) bool {
	word := func(i int) bool {
		return i >= 0 && i < len(m.in) && m.in[i] < unicode.MaxASCII && syntax.IsWordChar(m.in[i])
	}
	switch op {
	case syntax.OpBeginText:
		return at == 0
	case syntax.OpEndText:
		return at == len(m.in)
	case syntax.OpBeginLine:
		return at == 0 || m.in[at-1] == '\n'
	case syntax.OpEndLine:
		return at == len(m.in) || m.in[at] == '\n'
	case syntax.OpWordBoundary:
		return word(at-1) != word(at)
	}
	return word(at-1) == word(at) // OpNoWordBoundary
}

func contains(re *syntax.Regexp, r rune) bool {
	if re.Op != syntax.OpCharClass {
		return re.Op == syntax.OpAnyChar || r != '\n'
	}
	for i := 0; i+1 < len(re.Rune); i += 2 {
		if r >= re.Rune[i] && r <= re.Rune[i+1] {
			return true
		}
	}
	return false
}

func same(a, b rune, fold bool) bool {
	if a == b || !fold {
		return a == b
	}
	for r := unicode.SimpleFold(a); r != a; r = unicode.SimpleFold(r) {
		if r == b {
			return true
		}
	}
	return false
}
