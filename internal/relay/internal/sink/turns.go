package sink

import "slices"

// topicsInTurn bounds the topics of one regular request. The response for 10,000 topics would have 60,000 partitions, and its memory and the
// time to read it would exceed everything else that the sink does.
const topicsInTurn = 1000

// turns divides a list of topics between the rounds of a loop. The zero value begins with the first topic.
type turns struct{ last string }

// next returns the names that follow those of the previous round, at most n of them. names are sorted.
func (t *turns) next(names []string, n int) []string {
	if len(names) <= n {
		return names
	}

	start, found := slices.BinarySearch(names, t.last)
	if found {
		start++
	}
	part := make([]string, 0, n)
	for i := range n {
		part = append(part, names[(start+i)%len(names)])
	}
	t.last = part[n-1]
	return part
}
