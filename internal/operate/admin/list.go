package admin

import (
	"errors"
	"fmt"
	"slices"

	"github.com/outrelay/outrelay/internal/mongodb/listing"
	"github.com/outrelay/outrelay/internal/relay/stored/purge"
	"github.com/outrelay/outrelay/internal/service/agenda"
)

// Bounds of the pages of a list.
const (
	DefaultPage      = 100 // the default
	MaxPage          = 1000
	MaxScheduledPage = agenda.MaxPageSize
	MaxHistoryPage   = purge.MaxHistory
)

// Page is a page of a list.
type Page[T any] struct {
	Items []T    `json:"items"`
	Total int64  `json:"total"`          // on all pages
	Next  string `json:"next,omitempty"` // cursor of the next page, or "" on the last page
}

// newPage returns a page without items, which is not null in JSON.
func newPage[T any]() Page[T] { return Page[T]{Items: []T{}} }

// pageSize returns the number of entries of a page for the requested limit.
func pageSize(limit int) int {
	if limit <= 0 {
		return DefaultPage
	}
	return min(limit, MaxPage)
}

// ErrNoCondition is returned for an action whose filter has no condition.
var ErrNoCondition = errors.New("the filter has no condition; add one, or set all if everything is meant")

// CheckSelection returns [ErrNoCondition] for an action whose filter has no condition, unless all is set.
func CheckSelection(filter interface{ Empty() bool }, all bool) error {
	if filter.Empty() && !all {
		return ErrNoCondition
	}
	return nil
}

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

// readPage returns up to limit entries after a cursor, collection by collection in the order of their names, and the total of all
// collections.
func (c collectionLister[T, C]) readPage(namespaces []string, limit int, cursor string) (Page[T], error) {
	page := newPage[T]()
	var begin pagePlace[C]
	if cursor != "" {
		if err := listing.ParseCursor(cursor, &begin); err != nil {
			return page, err
		}
		if !slices.Contains(namespaces, begin.NS) {
			return page, fmt.Errorf("%w: the query does not include collection %q", listing.ErrCursor, begin.NS)
		}
	}

	for _, ns := range namespaces {
		if c.count != nil {
			n, err := c.count(ns)
			if err != nil {
				return page, err
			}
			page.Total += n
			if n == 0 {
				continue
			}
		}
		// Collections before the page, and those after its end, only add to the total.
		if ns < begin.NS || page.Next != "" {
			continue
		}

		at := pagePlace[C]{NS: ns}
		if ns == begin.NS {
			at = begin
		}
		if room := limit - len(page.Items); room > 0 {
			part, last, err := c.read(ns, at.After, room)
			if err != nil {
				return page, err
			}
			page.Items = append(page.Items, part...)
			if last == nil {
				continue
			}
			at.After = last
		}
		var err error
		if page.Next, err = listing.EncodeCursor(at); err != nil {
			return page, err
		}
	}
	return page, nil
}
