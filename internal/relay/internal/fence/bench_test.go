package fence

import (
	"fmt"
	"testing"
)

// BenchmarkTake is a takeover with nothing to read back.
func BenchmarkTake(b *testing.B) {
	for _, n := range []int{12, 100} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			c := newClient(b)
			tp := newTopic(b, c, n)
			o := newOwner(b, tp, n)
			o.takeAll(b, c)

			for b.Loop() {
				out := o.takeAll(b, c)
				for p := range n {
					o.offsets[tp][p] = out.Released[at(tp, p)].Next
				}
			}
		})
	}
}
