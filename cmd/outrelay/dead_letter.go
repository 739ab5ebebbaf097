package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/admin"
)

// maxPayload is more than a document can hold.
const maxPayload = 16 << 20

func printDeadLetter(w io.Writer, l admin.DeadLetter) error {
	line := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%-14s %s\n", name, sanitizeLine(fmt.Sprintf(format, args...)))
	}
	line("id", "%s", l.ID)
	line("collection", "%s", l.Collection)
	line("delivery", "%d", l.Delivery)
	line("version", "%d", l.Version)
	line("type", "%s", l.Type)
	line("aggregate", "%s", l.AggregateType)
	line("key", "%s", l.Key)
	line("topic", "%s", l.Topic)
	line("class", "%s", l.Class)
	line("reason", "%s", l.Reason)
	line("given up by", "%s", strings.Join(strings.Fields(strings.Join([]string{l.Source.Kind, l.Source.Watcher, l.Source.Group, l.Source.Handler, l.Source.Node}, " ")), " "))
	line("first failure", "%s", l.FirstFailure.Local().Format(time.DateTime))
	line("died", "%s", l.DiedAt.Local().Format(time.DateTime))
	if l.ReplayOf != "" {
		line("replay of", "%s", l.ReplayOf)
	}
	if r := l.Replayed; r != nil {
		line("requeued", "by %s at %s as delivery %d", r.Actor, r.At.Local().Format(time.DateTime), r.Delivery)
		if len(r.Edited) > 0 {
			line("edited", "%s", strings.Join(r.Edited, ", "))
		}
	}
	fmt.Fprintf(w, "\n%s\n", countNoun(int64(len(l.Attempts)), "attempt"))
	err := writeTable(w, "AT\tTOPIC\tCLASS\tNODE\tREASON", func(row func(...any)) {
		for _, a := range l.Attempts {
			row(a.At.Local().Format(time.DateTime), a.Topic, a.Class, a.Node, truncate(a.Reason, 120))
		}
	})
	if err != nil {
		return err
	}
	if l.Envelope == nil {
		_, err := fmt.Fprintf(w, "\nthe envelope, %s, cannot be shown as JSON\n", countNoun(int64(l.Size), "byte"))
		return err
	}
	var pretty bytes.Buffer
	if err := json.Indent(&pretty, l.Envelope, "", "  "); err != nil {
		return fmt.Errorf("showing the envelope: %w", err)
	}
	_, err = fmt.Fprintf(w, "\nenvelope, %s\n%s\n", countNoun(int64(l.Size), "byte"), pretty.Bytes())
	return err
}

// deadEditFlags are those of an edit.
type deadEditFlags struct {
	version     int32
	payload     string
	payloadAs   string
	headers     []string
	fields      []string
	unset       []string
	namedFields map[string]*string
}

func addDeadEditFlags(c *cobra.Command) *deadEditFlags {
	e := &deadEditFlags{namedFields: map[string]*string{}}
	flags := c.Flags()
	flags.Int32Var(&e.version, "version", 0, "the letter's `version` as shown; a letter that was changed since is refused")
	flags.StringVar(&e.payload, "payload", "", "a `file` with the new payload, or - for standard input")
	flags.StringVar(&e.payloadAs, "payload-as", "", "binary, string, json or null; default: the type that the payload has")
	flags.StringArrayVar(&e.headers, "header", nil, "a header as `name=value`; all that are given replace all that are there")
	flags.StringArrayVar(&e.fields, "field", nil, "another field of the envelope as `name=value`; may be repeated")
	flags.StringSliceVar(&e.unset, "unset", nil, "`fields` to remove, separated by commas")
	for _, f := range []string{"topic", "key", "type"} {
		e.namedFields[f] = flags.String(f, "", "the new "+f)
	}
	return e
}

// parseEdit reads the flags, and the payload from where they say.
func (e *deadEditFlags) parseEdit(c *cobra.Command, in io.Reader) (admin.DeadEdit, error) {
	out := admin.DeadEdit{Version: e.version, PayloadAs: e.payloadAs, Unset: e.unset, Fields: map[string]string{}}
	if !c.Flags().Changed("version") {
		return out, fmt.Errorf("--version is missing: the version of the letter that the edit was made from, as outrelay dead show tells it")
	}
	for _, f := range e.fields {
		name, value, ok := strings.Cut(f, "=")
		if !ok || name == "" {
			return out, fmt.Errorf("--field %q is not name=value", f)
		}
		out.Fields[name] = value
	}
	for name, value := range e.namedFields {
		if c.Flags().Changed(name) {
			out.Fields[name] = *value
		}
	}
	for _, h := range e.headers {
		name, value, ok := strings.Cut(h, "=")
		if !ok || name == "" {
			return out, fmt.Errorf("--header %q is not name=value", sanitizeLine(name))
		}
		out.Headers = append(out.Headers, [2]string{name, value})
	}
	var err error
	out.Payload, err = e.readPayload(in)
	return out, err
}

// readPayload is the new payload; nil keeps the old one.
func (e *deadEditFlags) readPayload(in io.Reader) ([]byte, error) {
	switch e.payload {
	case "":
		return nil, nil
	case "-":
	default:
		f, err := os.Open(e.payload)
		if err != nil {
			return nil, fmt.Errorf("--payload: %w", err)
		}
		defer f.Close()
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, maxPayload+1))
	if err != nil {
		return nil, fmt.Errorf("reading the payload: %w", err)
	}
	if len(b) > maxPayload {
		return nil, fmt.Errorf("the payload is larger than %s bytes, more than an envelope can hold", formatThousands(maxPayload))
	}
	if b == nil {
		b = []byte{}
	}
	return b, nil
}

func newDeadEditCommand(p *program) *cobra.Command {
	var o admin.DeadOptions
	c := &cobra.Command{
		Use:   "edit ID",
		Short: "Change one dead letter's envelope and deliver it again",
		Long: `Change the envelope of one dead letter and give it back to its outbox as the next delivery. The letter keeps what died. It
serves letters of which only the id is left too: give them aggregatetype, aggregateid, type and a payload. The result is
checked before anything is written.`,
		Example: `  outrelay dead edit 0190b3c2-… --version 0 --topic payments.v2
  outrelay dead edit 0190b3c2-… --version 0 --payload order.json --unset contenttype
  outrelay dead edit 0190b3c2-… --version 0 --field aggregatetype=order --field aggregateid=7 --type OrderPlaced --payload - --payload-as json`,
		Args: cobra.ExactArgs(1),
	}
	a, ref, e := p.addChangeFlags(c), addDeadRefFlags(c), addDeadEditFlags(c)
	c.Flags().BoolVar(&o.IgnoreExpiry, "ignore-expiry", false, "also if it has expired; it does not expire again")
	c.RunE = func(c *cobra.Command, args []string) error {
		edit, err := e.parseEdit(c, p.in)
		if err != nil {
			return err
		}
		ref.ID, o.DryRun = args[0], a.dryRun
		return a.withOperator(c.Context(), func(ctx context.Context, op admin.Operator) error {
			if !a.dryRun {
				if err := a.confirm(ctx, "change 1 dead letter and requeue it, which consumers get with the same id"); err != nil {
					return err
				}
			}
			got, err := op.DeadEdit(ctx, *ref, edit, o)
			if err != nil {
				return err
			}
			return a.printResult(got, func(w io.Writer) error {
				verb := "is requeued"
				if got.DryRun {
					verb = "would be requeued"
				}
				_, err := fmt.Fprintf(w, "%s of %s %s as delivery %d with changed %s\n", sanitizeLine(got.ID), got.Collection, verb, got.Delivery, strings.Join(got.Edited, ", "))
				return err
			})
		})
	}
	return c
}
