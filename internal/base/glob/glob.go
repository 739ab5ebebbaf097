// Package glob matches names against patterns. In a pattern, * matches any sequence of characters, also an
// empty one, and ? matches one character. All other characters match themselves. There is no separator.
//
// Patterns have no escapes and no character classes, because names of collections, topics and event types
// may contain any character. path.Match would reject some patterns, and treat a slash as a separator.
package glob

import "strings"

// HasWildcard reports whether pattern has a * or a ?, so that it may match several names.
func HasWildcard(pattern string) bool { return strings.ContainsAny(pattern, "*?") }

// Match reports whether pattern matches the whole name. It backtracks at most to the last *, so it takes at
// most len(pattern) times len(name) steps. It does not allocate.
func Match[S ~string | ~[]byte](pattern string, name S) bool {
	return matchPattern(pattern, name, ofName)
}

// Covers reports whether pattern matches every name that the pattern other matches. It may return false
// although pattern does.
func Covers(pattern, other string) bool { return matchPattern(pattern, other, ofPattern) }

// kind is the kind of the text that matchPattern compares with a pattern.
type kind bool

const (
	ofName    kind = false
	ofPattern kind = true
)

// matchPattern reports whether pattern matches name. If name is a pattern too, only a * of pattern matches a * of name.
func matchPattern[S ~string | ~[]byte](pattern string, name S, kind kind) bool {
	// place and i are the places in pattern and name. star is the last * in pattern, or -1. mark is the place in
	// name up to which this * matches.
	place, i, star, mark := 0, 0, -1, 0
	for i < len(name) {
		switch {
		case place < len(pattern) && pattern[place] == '*':
			star, mark = place, i
			place++

		case place < len(pattern) && pattern[place] == '?' && (kind == ofName || name[i] != '*'):
			place++
			i++
			// Skip the rest of a character of several bytes.
			for i < len(name) && name[i]&0xC0 == 0x80 {
				i++
			}

		case place < len(pattern) && pattern[place] == name[i]:
			place++
			i++

		case star >= 0:
			// No match from here on: let the last * match one more byte, and try again after it.
			mark++
			place, i = star+1, mark

		default:
			return false
		}
	}

	return strings.Trim(pattern[place:], "*") == ""
}

// Overlap reports whether any name matches both patterns.
func Overlap(a, b string) bool {
	second := []rune(b)

	// reach[j] reports whether a name can match both the part of a that was read and second[:j].
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
			case c == '*':
				// It can match any rest of b.
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

		// A star of b can also match nothing.
		for j, r := range second {
			next[j+1] = next[j+1] || next[j] && r == '*'
		}
		reach = next
	}
	return reach[len(second)]
}
