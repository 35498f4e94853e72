package client_test

import (
	"context"
	"encoding/xml"
	"fmt"

	"github.com/hopback/hopback/client"
)

// XMLCodec is a codec for XML. Use it as PublisherConfig.Codec and with Typed.
type XMLCodec struct{}

// Encode sets the body and its content type.
func (XMLCodec) Encode(v any, m *client.Message) error {
	body, err := xml.Marshal(v)
	if err != nil {
		return err
	}
	m.Data = [][]byte{body}
	if m.Properties == nil {
		m.Properties = &client.Properties{}
	}
	m.Properties.ContentType = new("application/xml")
	return nil
}

// Decode reads the body. A message with an error goes to the dead-letter queue.
func (XMLCodec) Decode(m *client.Message, v any) error {
	body, err := client.Body(m)
	if err != nil {
		return err
	}
	return xml.Unmarshal(body, v)
}

type Invoice struct {
	Number string `xml:"number"`
}

// A codec of your own encodes what a publisher sends, and decodes what a handler gets. A
// publisher has it in client.PublisherConfig{Codec: XMLCodec{}}.
func ExampleCodec() {
	var message client.Message
	if err := (XMLCodec{}).Encode(Invoice{Number: "2026-17"}, &message); err != nil {
		fmt.Println(err)
	}
	fmt.Printf("%s\n", message.GetData())

	handler := client.Typed(XMLCodec{}, func(ctx context.Context, i Invoice) error {
		fmt.Println("got", i.Number)
		return nil
	})
	fmt.Println(handler.Handle(context.Background(), client.NewDelivery("invoices", &message)))
	bad := client.NewDelivery("invoices", client.NewMessage([]byte("<Invoice>")))
	fmt.Println(handler.Handle(context.Background(), bad))
	// Output:
	// <Invoice><number>2026-17</number></Invoice>
	// got 2026-17
	// <nil>
	// dead-letter (undecodable): XML syntax error on line 1: unexpected EOF
}
