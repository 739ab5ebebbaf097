package operate

import (
	"context"
	"iter"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// listAll returns the entries of all pages. read returns the page after a cursor, and the cursor of the next page.
func listAll[Stored, Shown any](
	ctx context.Context, operator *Operator, doing string,
	read func(use admin.Operator, after string) (list []Stored, next string, err error), show func(*Stored) Shown,
) iter.Seq2[Shown, error] {
	return func(yield func(Shown, error) bool) {
		use, err := operator.prepare(ctx)
		for after := ""; err == nil; {
			var list []Stored
			if list, after, err = read(use, after); err != nil {
				break
			}
			for i := range list {
				if !yield(show(&list[i]), nil) {
					return
				}
			}
			if after == "" {
				return
			}
		}

		var none Shown
		yield(none, explain(doing, err))
	}
}
