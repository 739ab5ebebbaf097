package migrate

import (
	"errors"
	"slices"
	"strings"
	"sync"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/schema"
)

// collector is a report that several goroutines fill.
type collector struct {
	mu sync.Mutex
	Report
}

func newCollector() *collector {
	return &collector{Report: Report{
		Applied: []string{}, Pending: []string{}, Newer: []string{},
		Conflicts: []string{}, Missing: []Grant{}, Busy: []string{},
	}}
}

// absorbError adds err to the report and returns nil if the migration can continue after it: a missing
// privilege, a busy collection or a conflicting index. It returns any other error.
func (c *collector) absorbError(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()

	if p, ok := errors.AsType[*mongodb.PrivilegeError](err); ok {
		c.Missing = append(c.Missing, Grant{Action: p.Action, On: p.On, Advice: p.Advice})
		return nil
	}
	if errors.Is(err, schema.ErrBusy) {
		c.Busy = append(c.Busy, err.Error())
		return nil
	}
	if errors.Is(err, mongodb.ErrIndexConflict) {
		c.Conflicts = append(c.Conflicts, err.Error())
		return nil
	}
	return err
}

// mergeReport adds the problems in o to the report.
func (c *collector) mergeReport(o Report) {
	c.Missing = append(c.Missing, o.Missing...)
	c.Busy = append(c.Busy, o.Busy...)
	c.Conflicts = append(c.Conflicts, o.Conflicts...)
}

func (c *collector) markPending(steps []Step) {
	for _, s := range steps {
		if !slices.Contains(c.Pending, s.ID) {
			c.Pending = append(c.Pending, s.ID)
		}
	}
}

func (c *collector) markApplied(s Step) {
	c.Applied = append(c.Applied, s.ID)
	c.Pending = slices.DeleteFunc(c.Pending, func(id string) bool { return id == s.ID })
}

// sortedReport returns the report, with each problem once and in a fixed order.
func (c *collector) sortedReport() Report {
	c.mu.Lock()
	defer c.mu.Unlock()

	compare := func(a, b Grant) int { return strings.Compare(a.On+" "+a.Action, b.On+" "+b.Action) }
	slices.SortStableFunc(c.Missing, compare)
	c.Missing = slices.CompactFunc(c.Missing, func(a, b Grant) bool { return compare(a, b) == 0 })
	slices.Sort(c.Conflicts)
	c.Conflicts = slices.Compact(c.Conflicts)
	slices.Sort(c.Busy)
	c.Busy = slices.Compact(c.Busy)
	return c.Report
}
