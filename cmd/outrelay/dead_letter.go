package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// maxPayload bounds the payload of an edit. It is the maximum size of a MongoDB document, which no
// payload can reach.
const maxPayload = 16 << 20

func writeDeadLetter(w io.Writer, l admin.DeadLetter) {
	printField := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%-14s %s\n", name, sanitizeLine(fmt.Sprintf(format, args...)))
	}
	if l.Letter != "" {
		printField("letter", "%s", l.Letter)
	}
	printField("id", "%s", quoteArgument(l.ID))
	printField("collection", "%s", l.Collection)
	printField("delivery", "%d", l.Delivery)
	printField("version", "%d", l.Version)
	printField("type", "%s", l.Type)
	printField("aggregate", "%s", l.AggregateType)
	printField("key", "%s", l.Key)
	printField("topic", "%s", l.Topic)
	printField("class", "%s", l.Class)
	printField("reason", "%s", l.Reason)

	// Fields drops the parts that are empty.
	source := []string{l.Source.Kind, l.Source.Watcher, l.Source.Group, l.Source.Handler, l.Source.Node}
	printField("given up by", "%s", strings.Join(strings.Fields(strings.Join(source, " ")), " "))
	printField("first failure", "%s", formatLocal(&l.FirstFailure))
	printField("died", "%s", formatLocal(&l.DiedAt))

	if l.ReplayOf != "" {
		printField("replay of", "%s", l.ReplayOf)
	}
	// The relay gives the envelope a delivery number. A handler gets the same message again.
	if r := l.Requeued; r != nil && l.Source.Kind == admin.FromHandler {
		printField("requeued", "by %s at %s: %s", r.Actor, formatLocal(&r.At), requeueState(l))
	} else if r != nil {
		printField("requeued", "by %s at %s as delivery %d", r.Actor, formatLocal(&r.At), r.Delivery)
		if len(r.Edited) > 0 {
			printField("edited", "%s", strings.Join(r.Edited, ", "))
		}
	}

	fmt.Fprintf(w, "\n%s\n", countNoun(int64(len(l.Attempts)), "attempt"))
	writeTable(w, "AT\tTOPIC\tCLASS\tNODE\tREASON", l.Attempts, func(a admin.DeadAttempt) cells {
		return cells{formatLocal(&a.At), a.Topic, a.Class, a.Node, truncate(a.Reason, 120)}
	})

	size := countNoun(int64(l.Size), "byte")
	var pretty bytes.Buffer
	if json.Indent(&pretty, l.Envelope, "", "  ") != nil {
		fmt.Fprintf(w, "\nthe envelope, %s, cannot be shown as JSON\n", size)
		return
	}
	fmt.Fprintf(w, "\nenvelope, %s\n%s\n", size, pretty.Bytes())
}

// deadEditFlags holds the flags of an edit.
type deadEditFlags struct {
	version     int32
	payload     string
	payloadAs   string
	headers     []string
	fields      []string
	unset       []string
	namedFields map[string]*string // fields with their own flag, such as --topic
}

func addDeadEditFlags(c *cobra.Command) *deadEditFlags {
	e := &deadEditFlags{namedFields: map[string]*string{}}
	flags := c.Flags()
	flags.Int32Var(&e.version, "version", 0, "the `version` of the dead letter from dead show; the edit fails if it has changed since")
	flags.StringVar(&e.payload, "payload", "", "a `file` with the new payload, or - for standard input")
	flags.StringVar(&e.payloadAs, "payload-as", "", "binary, string, json or null; default: the current type of the payload")
	flags.StringArrayVar(&e.headers, "header", nil, "a header as `name=value`; may be repeated; replaces all existing headers")
	flags.StringArrayVar(&e.fields, "field", nil, "another field of the envelope as `name=value`; may be repeated")
	flags.StringSliceVar(&e.unset, "unset", nil, "`fields` to remove, separated by commas")
	for _, f := range []string{"topic", "key", "type"} {
		e.namedFields[f] = flags.String(f, "", "the new "+f)
	}
	return e
}

// parseEdit returns the edit that the flags describe. It reads the payload from its file or from in.
func (e *deadEditFlags) parseEdit(c *cobra.Command, in io.Reader) (admin.DeadEdit, error) {
	out := admin.DeadEdit{Version: e.version, PayloadAs: e.payloadAs, Unset: e.unset, Fields: map[string]string{}}
	// Without the version, the edit could replace an edit that another person made after the letter was shown.
	if !c.Flags().Changed("version") {
		return out, fmt.Errorf("--version is missing: pass the version that `outrelay dead show` prints for the dead letter")
	}

	for _, f := range e.fields {
		name, value, ok := strings.Cut(f, "=")
		if !ok || name == "" {
			return out, fmt.Errorf("--field %q is not name=value", f)
		}
		out.Fields[name] = value
	}
	// Flags with a name, such as --topic, override the same field in --field.
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

// readPayload returns the new payload, or nil if the letter keeps its payload. An empty new payload is not nil.
func (e *deadEditFlags) readPayload(in io.Reader) ([]byte, error) {
	if e.payload == "" {
		return nil, nil
	}
	if e.payload != "-" {
		f, err := os.Open(e.payload)
		if err != nil {
			return nil, fmt.Errorf("--payload: %w", err)
		}
		defer f.Close()
		in = f
	}

	// One byte above the limit distinguishes a payload that is too long from one that fits.
	b, err := io.ReadAll(io.LimitReader(in, maxPayload+1))
	if err != nil {
		return nil, fmt.Errorf("reading the payload: %w", err)
	}
	if len(b) > maxPayload {
		return nil, fmt.Errorf("the payload exceeds %s bytes, more than an envelope can hold", formatThousands(maxPayload))
	}
	// nil means unchanged, so an empty file needs an empty slice.
	if b == nil {
		b = []byte{}
	}
	return b, nil
}

func newDeadEditCommand(p *program) *cobra.Command {
	var o admin.DeadOptions
	c := &cobra.Command{
		Use:   "edit ID",
		Short: "Change the envelope of one dead letter and deliver it again",
		Long: `Change the envelope of one dead letter and deliver it again as the next delivery. The
letter keeps the original envelope. The command can also complete a letter that has only an id: set
aggregatetype, aggregateid, type and a payload. The result is checked before anything is written.

With --source handler, change the key, the headers or the payload of a message and hand it back to
its handler. The new payload contains the bytes of the file, so --payload-as can only be null.`,
		Example: `  outrelay dead edit 0190b3c2-… --version 0 --topic payments.v2
  outrelay dead edit 0190b3c2-… --version 0 --payload order.json --unset contenttype
  outrelay dead edit 0190b3c2-… --version 0 --field aggregatetype=order --field aggregateid=7 --type OrderPlaced --payload - --payload-as json`,
		Args: exactArgs(1),
	}

	a, ref, e := p.addChangeFlags(c), addDeadRefFlags(c), addDeadEditFlags(c)
	addToFlag(c, &o)
	c.Flags().BoolVar(&o.IgnoreExpiry, "ignore-expiry", false, "also requeue an expired envelope; it does not expire again")
	c.RunE = func(c *cobra.Command, args []string) error {
		edit, err := e.parseEdit(c, p.in)
		if err != nil {
			return err
		}

		ref.ID, o.DryRun = args[0], a.dryRun
		return a.withOperator(c.Context(), func(ctx context.Context, op admin.Operator) error {
			if !a.dryRun {
				if err := a.confirm(ctx, "change 1 dead letter and requeue it; consumers get the same id again"); err != nil {
					return err
				}
			}

			got, err := op.Letters().Edit(ctx, *ref, edit, o)
			if err != nil {
				return err
			}

			verb := a.chooseText("is requeued", "would be requeued")
			return a.printLine(got, "%s of %s %s as delivery %d with changed %s",
				quoteArgument(got.ID), got.Collection, verb, got.Delivery, strings.Join(got.Edited, ", "))
		})
	}
	return c
}
