// Package glob matches names against patterns in which * stands for any run of characters, none as well, and ? for one
// character. Everything else stands for itself; no character separates parts of a name.
//
// The language has no escapes and no character classes, because names of collections, topics and event types may contain
// any character: path.Match would refuse some patterns, and treat a slash as a separator.
package glob

import "strings"

// Any reports whether a pattern has a * or a ?, so that it may match several names.
func Any(pattern string) bool { return strings.ContainsAny(pattern, "*?") }

// Match reports whether the pattern matches the whole name. It goes back to the last * at most, so it takes no more than
// len(pattern) times len(name) steps, and it allocates nothing.
func Match[S ~string | ~[]byte](pattern string, name S) bool {
	return matchPattern(pattern, name, false)
}

// Covers reports whether the pattern matches everything that another one matches. It may answer false where it does.
func Covers(pattern, other string) bool { return matchPattern(pattern, other, true) }

// matchPattern matches a name, or with stars a pattern, whose stars only a star matches.
func matchPattern[S ~string | ~[]byte](pattern string, name S, stars bool) bool {
	p, i, star, mark := 0, 0, -1, 0
	for i < len(name) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, mark = p, i
			p++
		case p < len(pattern) && pattern[p] == '?' && (!stars || name[i] != '*'):
			p++
			i++
			for i < len(name) && name[i]&0xC0 == 0x80 { // the rest of a character of several bytes
				i++
			}
		case p < len(pattern) && pattern[p] == name[i]:
			p++
			i++
		case star >= 0:
			mark++
			p, i = star+1, mark
		default:
			return false
		}
	}
	return strings.Trim(pattern[p:], "*") == ""
}

// Meet reports whether some name matches both patterns.
func Meet(a, b string) bool {
	second := []rune(b)
	// reach[j]: what was read of a can be matched by second[:j].
	reach := make([]bool, len(second)+1)
	reach[0] = true
	for j := 0; j < len(second) && second[j] == '*'; j++ {
		reach[j+1] = true
	}
	for _, c := range a {
		next := make([]bool, len(second)+1)
		for j, reached := range reach {
			switch {
			case !reached:
			case c == '*': // stands for whatever b has from here on
				for k := j; k <= len(second); k++ {
					next[k] = true
				}
			case j == len(second):
			case second[j] == '*':
				next[j] = true
			case c == '?' || second[j] == '?' || c == second[j]:
				next[j+1] = true
			}
		}
		for j, r := range second { // a star of b may also stand for nothing
			next[j+1] = next[j+1] || next[j] && r == '*'
		}
		reach = next
	}
	return reach[len(second)]
}
