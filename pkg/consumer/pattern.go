package consumer

import "strings"

// matches reports whether the type matches the pattern: each * stands for any run of characters, dots included and none
// as well; everything else stands for itself.
func matches(pattern, typ string) bool {
	star, back := -1, 0
	p, t := 0, 0
	for t < len(typ) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, back = p, t
			p++
		case p < len(pattern) && pattern[p] == typ[t]:
			p, t = p+1, t+1
		case star >= 0:
			back++
			p, t = star+1, back
		default:
			return false
		}
	}
	return strings.Trim(pattern[p:], "*") == ""
}

// overlap reports whether some type matches both patterns.
func overlap(a, b string) bool {
	// reach[j]: what was read of a can be matched by b[:j].
	reach := make([]bool, len(b)+1)
	reach[0] = true
	closure := func() {
		for j := range len(b) {
			if reach[j] && b[j] == '*' {
				reach[j+1] = true
			}
		}
	}
	closure()
	for i := range len(a) {
		next := make([]bool, len(b)+1)
		for j := range reach {
			if !reach[j] {
				continue
			}
			if a[i] == '*' { // it may stand for whatever b has from here on
				for k := j; k <= len(b); k++ {
					next[k] = true
				}
				break
			}
			if j == len(b) {
				continue
			}
			switch b[j] {
			case '*':
				next[j] = true
			case a[i]:
				next[j+1] = true
			}
		}
		reach = next
		closure()
	}
	return reach[len(b)]
}
