package migrate

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"go.mongodb.org/mongo-driver/v2/mongo"

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
		c.addGrantLocked(Grant{Action: p.Action, On: p.On, Advice: p.Advice})
		return nil
	}
	if errors.Is(err, schema.ErrBusy) {
		c.Busy = append(c.Busy, err.Error())
		return nil
	}
	if errors.Is(err, mongodb.ErrIndexConflict) {
		c.addConflictLocked(err.Error())
		return nil
	}
	return err
}

func (c *collector) addGrantLocked(g Grant) {
	if !slices.ContainsFunc(c.Missing, func(h Grant) bool { return h.Action == g.Action && h.On == g.On }) {
		c.Missing = append(c.Missing, g)
	}
}

func (c *collector) addConflictLocked(text string) {
	if !slices.Contains(c.Conflicts, text) {
		c.Conflicts = append(c.Conflicts, text)
	}
}

func (c *collector) mergeReport(o *collector) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, g := range o.Missing {
		c.addGrantLocked(g)
	}
	c.Busy = append(c.Busy, o.Busy...)
	for _, text := range o.Conflicts {
		c.addConflictLocked(text)
	}
}

func (c *collector) missingGrants() []Grant {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.Missing)
}

func (c *collector) markPending(steps []Step) {
	for _, s := range steps {
		if !slices.Contains(c.Pending, s.ID) {
			c.Pending = append(c.Pending, s.ID)
		}
	}
}

func (c *collector) setNewer(ids []string) { c.Newer = append([]string{}, ids...) }

func (c *collector) markApplied(s Step) {
	c.Applied = append(c.Applied, s.ID)
	c.Pending = slices.DeleteFunc(c.Pending, func(id string) bool { return id == s.ID })
}

func (c *collector) sortedReport() Report {
	c.mu.Lock()
	defer c.mu.Unlock()
	slices.SortFunc(c.Missing, func(a, b Grant) int {
		return strings.Compare(a.On+" "+a.Action, b.On+" "+b.Action)
	})
	slices.Sort(c.Conflicts)
	slices.Sort(c.Busy)
	c.Busy = slices.Compact(c.Busy)
	return c.Report
}

const codeUnauthorized = 13

// wrapPrivilegeError wraps err. If the server rejected the command for lack of a privilege, the result is
// a *mongodb.PrivilegeError.
func wrapPrivilegeError(err error, doing, action, on string) error {
	var se mongo.ServerError
	if errors.As(err, &se) && se.HasErrorCode(codeUnauthorized) {
		err = &mongodb.PrivilegeError{Action: action, On: on, Err: err}
	}
	return fmt.Errorf("%s: %w", doing, err)
}
