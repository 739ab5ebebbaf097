package opspage

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/outrelay/outrelay/internal/admin"
)

// dead is the list of dead letters.
type dead struct {
	admin.DeadPage
	Groups      []admin.DeadGroup
	Empty       bool // no condition is set
	Stand       string
	Collections []string
}

// deadPage is how many letters are shown at a time unless somebody asks for more: the page has to be read on a telephone.
const deadPage = 50

func showDead(c *call) (any, error) {
	f, err := c.deadFilter()
	if err != nil {
		return nil, err
	}
	d := dead{Empty: f.Empty(), Stand: f.RequeueStatus}
	limit := c.limit()
	if limit == 0 {
		limit = deadPage
	}
	if d.DeadPage, err = c.use.Letters.List(c.ctx, f, limit, c.get("after")); err != nil {
		return nil, err
	}
	if d.Total > 0 && d.Total <= summaryUpTo {
		if d.Groups, err = c.use.Letters.Summary(c.ctx, f); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// summaryUpTo is how many letters are grouped without being asked: it reads them.
const summaryUpTo = 20_000

// letter is one dead letter and what the form that changes it begins with.
type letter struct {
	admin.DeadLetter
	Fields  []field
	Payload string
	As      string
	Headers string
	Shown   bool // the payload was asked for and may be seen
}

// field is one that an edit may change.
type field struct {
	Name, Label, Value string
}

// editable are the fields that a person may want to change; of the others an edit keeps what they are.
var editable = []field{
	{Name: "type", Label: "Type"},
	{Name: "topic", Label: "Topic"},
	{Name: "partition", Label: "Partition"},
	{Name: "key", Label: "Key"},
	{Name: "aggregatetype", Label: "Aggregate type"},
	{Name: "aggregateid", Label: "Aggregate id"},
	{Name: "contenttype", Label: "Content type"},
	{Name: "subject", Label: "Subject"},
	{Name: "expiresAt", Label: "Expires at"},
}

func (c *call) deadRef() (admin.DeadRef, error) {
	ref := admin.DeadRef{Collection: c.get("collection"), ID: c.q.Get("id"), Delivery: -1}
	if text := c.get("delivery"); text != "" {
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			return ref, wrong("delivery: %q is not a number", text)
		}
		ref.Delivery = int(n)
	}
	if ref.ID == "" {
		return ref, wrong("no id says which letter")
	}
	return ref, nil
}

func showLetter(c *call) (any, error) {
	ref, err := c.deadRef()
	if err != nil {
		return nil, err
	}
	show := c.get("payload") != "" && c.who.Payloads
	got, err := c.use.Letters.Show(c.ctx, ref, show)
	if err != nil {
		return nil, err
	}
	d := letter{DeadLetter: got, Shown: show, Fields: make([]field, len(editable))}
	copy(d.Fields, editable)
	var env map[string]json.RawMessage
	if json.Unmarshal(got.Envelope, &env) != nil {
		return d, nil // it cannot be written as JSON: the fields begin empty
	}
	for i := range d.Fields {
		d.Fields[i].Value = plain(env[d.Fields[i].Name])
	}
	if p := plain(env["payload"]); show && !strings.Contains(p, "***") {
		d.Payload = p // else the form begins empty: what stands for a hidden value must not replace it
	}
	return d, nil
}

// plain is the value of a field as it is typed: a string without its quotes, a time as RFC 3339, anything else as JSON.
func plain(raw json.RawMessage) string {
	if len(raw) == 0 || string(raw) == "null" {
		return ""
	}
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return s
	}
	var date struct {
		At string `json:"$date"`
	}
	if json.Unmarshal(raw, &date) == nil && date.At != "" {
		return date.At
	}
	return pretty(raw)
}

// downloadAtMost is how many letters one file has.
const downloadAtMost = 10_000

// download is what matches as lines of JSON, without envelopes unless payloads are asked for and may be seen: a copy to keep
// before letters are discarded.
func (p *page) download(w http.ResponseWriter, r *http.Request) {
	c, done, ok := p.begin(w, r, p.o.Act)
	if !ok {
		return
	}
	defer done()
	f, err := c.deadFilter()
	if err != nil {
		p.fail(w, r, c, err)
		return
	}
	first, err := c.use.Letters.List(c.ctx, f, admin.MaxPage, "") //nolint:contextcheck // c.ctx is that of the request, with a time-out
	if err != nil {
		p.fail(w, r, c, err)
		return
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Content-Disposition", fmt.Sprintf(`attachment; filename="dead-%s.ndjson"`, c.v.Now.UTC().Format("20060102-150405")))
	out := json.NewEncoder(w)
	for n, page := 0, first; ; {
		for _, l := range page.Letters {
			if c.get("payload") != "" && c.who.Payloads {
				if l, err = c.use.Letters.Show(c.ctx, admin.DeadRef{Collection: l.Collection, ID: l.ID, Delivery: int(l.Delivery)}, true); err != nil { //nolint:contextcheck // likewise
					panic(http.ErrAbortHandler) // half a file must not look like a whole one
				}
			}
			if out.Encode(l) != nil {
				return
			}
			n++
		}
		if page.Next == "" || n >= downloadAtMost {
			return
		}
		if page, err = c.use.Letters.List(c.ctx, f, admin.MaxPage, page.Next); err != nil { //nolint:contextcheck // likewise
			panic(http.ErrAbortHandler)
		}
	}
}
