package admin

import (
	"fmt"
	"slices"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// pagePlace is the place at which a page of a list over several collections begins. The pages so far contain all entries of the
// collections before NS, and the entries of NS up to After.
type pagePlace[C any] struct {
	NS    string `bson:"n"`
	After *C     `bson:"a,omitempty"` // nil: the page begins with the first entry of NS
}

// collectionLister lists the entries of type T in one of several collections, in an order in which C is a place.
type collectionLister[T, C any] struct {
	// count returns the number of entries. It may be nil if the list has no total.
	count func(ns string) (int64, error)

	// read returns up to limit entries after a place, and the place of the last one if more may follow.
	read func(ns string, after *C, limit int) (list []T, last *C, err error)
}

// readPage returns up to limit entries after a cursor, collection by collection in the order of their names. It also returns the
// total of all collections, and the cursor of the next page.
func (c collectionLister[T, C]) readPage(namespaces []string, limit int, cursor string) (list []T, total int64, next string, err error) {
	list = []T{}
	var begin pagePlace[C]
	if cursor != "" {
		if err := mongodb.ParseCursor(cursor, &begin); err != nil {
			return list, 0, "", err
		}
		if !slices.Contains(namespaces, begin.NS) {
			return list, 0, "", fmt.Errorf("%w: the query does not include collection %q", mongodb.ErrCursor, begin.NS)
		}
	}

	for _, ns := range namespaces {
		if c.count != nil {
			n, err := c.count(ns)
			if err != nil {
				return list, total, "", err
			}
			total += n
			if n == 0 {
				continue
			}
		}
		// Collections before the page, and those after its end, only add to the total.
		if ns < begin.NS || next != "" {
			continue
		}

		at := pagePlace[C]{NS: ns}
		if ns == begin.NS {
			at = begin
		}
		if room := limit - len(list); room > 0 {
			part, last, err := c.read(ns, at.After, room)
			if err != nil {
				return list, total, "", err
			}
			list = append(list, part...)
			if last == nil {
				continue
			}
			at.After = last
		}
		if next, err = mongodb.EncodeCursor(at); err != nil {
			return list, total, "", err
		}
	}
	return list, total, next, nil
}
