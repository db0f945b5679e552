// Gradients from the service by its protos alone: a unary call, a streamed one, and refusals.
//
//	quickstart localhost:50051 [FILE]
//
// FILE gets the bytes of the gradients.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "quickstart/npugrad/v1"
)

const chunkBytes = 1 << 20

// A call's operands by the `operand` of their chunks: the number of the field in the request, less 2.
const gradOutput, input, grid, inputGrad, gridGrad = 0, 1, 2, 7, 8

// serviceError is what errors.proto says: see the fields of ErrorInfo there.
type serviceError struct {
	message string
	info    pb.ErrorInfo
	broken  pb.BadRequest
	retry   pb.RetryInfo // the same call may succeed after its retry_delay
}

func (e *serviceError) Error() string { return e.message }

func typed(err error) error {
	found := status.Convert(err)
	made := &serviceError{message: found.Message()}
	kinds := map[string]proto.Message{"ErrorInfo": &made.info, "BadRequest": &made.broken, "RetryInfo": &made.retry}
	for _, detail := range found.Proto().GetDetails() {
		name := strings.TrimPrefix(detail.GetTypeUrl(), "type.googleapis.com/google.rpc.")
		if kind, known := kinds[name]; known && proto.Unmarshal(detail.GetValue(), kind) != nil {
			return err
		}
	}
	return made
}

type call func(pb.BackwardServiceClient, *pb.GridSampler2DBackwardRequest) (*pb.GridSampler2DBackwardResponse, error)

func unary(client pb.BackwardServiceClient, request *pb.GridSampler2DBackwardRequest) (*pb.GridSampler2DBackwardResponse, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	response, err := client.GridSampler2DBackward(ctx, request)
	if err != nil {
		return nil, typed(err)
	}
	return response, nil
}

func execute(client pb.BackwardServiceClient, request *pb.GridSampler2DBackwardRequest) (*pb.GridSampler2DBackwardResponse, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	stream, err := client.Execute(ctx)
	if err != nil {
		return nil, typed(err)
	}
	send(stream, request) // where it fails the service has refused the call, and Recv says why
	return receive(stream)
}

// send sends the header, which announces each tensor, and the chunks that bring them.
func send(stream pb.BackwardService_ExecuteClient, request *pb.GridSampler2DBackwardRequest) {
	header := proto.Clone(request).(*pb.GridSampler2DBackwardRequest)
	for _, tensor := range []*pb.Tensor{header.GradOutput, header.Input, header.Grid} {
		tensor.Content = &pb.Tensor_ChunkedBytes{ChunkedBytes: uint64(len(tensor.GetData()))}
	}
	named := &pb.ExecuteHeader_GridSampler_2DBackward{GridSampler_2DBackward: header}
	frame := &pb.ExecuteRequest{Frame: &pb.ExecuteRequest_Header{Header: &pb.ExecuteHeader{Call: named}}}
	if stream.Send(frame) != nil {
		return
	}
	for operand, tensor := range []*pb.Tensor{gradOutput: request.GradOutput, input: request.Input, grid: request.Grid} {
		data := tensor.GetData()
		for offset := 0; offset < len(data); offset += chunkBytes {
			piece := data[offset:]
			if len(piece) > chunkBytes {
				piece = piece[:chunkBytes]
			}
			chunk := &pb.Chunk{Operand: uint32(operand), Offset: uint64(offset), Data: piece}
			if stream.Send(&pb.ExecuteRequest{Frame: &pb.ExecuteRequest_Chunk{Chunk: chunk}}) != nil {
				return
			}
		}
	}
	_ = stream.CloseSend()
}

func receive(stream pb.BackwardService_ExecuteClient) (*pb.GridSampler2DBackwardResponse, error) {
	var response *pb.GridSampler2DBackwardResponse
	for {
		reply, err := stream.Recv()
		if err == io.EOF {
			return response, nil
		} else if err != nil {
			return nil, typed(err)
		}
		if chunk := reply.GetChunk(); chunk != nil {
			tensor := map[uint32]*pb.Tensor{inputGrad: response.InputGrad, gridGrad: response.GridGrad}[chunk.Operand]
			copy(tensor.GetData()[chunk.Offset:], chunk.Data)
			continue
		}
		response = reply.GetHeader().GetGridSampler_2DBackward()
		for _, tensor := range []*pb.Tensor{response.InputGrad, response.GridGrad} {
			if announced, chunked := tensor.Content.(*pb.Tensor_ChunkedBytes); chunked { // small ones come here
				tensor.Content = &pb.Tensor_Data{Data: make([]byte, announced.ChunkedBytes)}
			}
		}
	}
}

func tensor(shape ...int64) *pb.Tensor {
	length := int64(1)
	for _, size := range shape {
		length *= size
	}
	numbers := make([]float32, length)
	for i := range numbers {
		numbers[i] = float32(float64(i*37%101)/50 - 1)
	}
	var data bytes.Buffer
	_ = binary.Write(&data, binary.LittleEndian, numbers)
	meta := &pb.TensorMeta{DataType: pb.DataType_DATA_TYPE_FLOAT32, Shape: shape}
	return &pb.Tensor{Meta: meta, Content: &pb.Tensor_Data{Data: data.Bytes()}}
}

func run(target string, file string) error {
	// gRPC's own limit is 4 MiB, and a reply may be larger.
	limit := grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<31 - 1))
	connection, err := grpc.Dial(target, grpc.WithInsecure(), limit)
	if err != nil {
		return err
	}
	defer connection.Close()
	client := pb.NewBackwardServiceClient(connection)
	request := &pb.GridSampler2DBackwardRequest{
		GradOutput: tensor(1, 3, 64, 64), Input: tensor(1, 3, 512, 512), Grid: tensor(1, 64, 64, 2),
		InterpolationMode: proto.Int64(0), PaddingMode: proto.Int64(0), AlignCorners: proto.Bool(false),
		OutputMask: &pb.BoolArray{Values: []bool{true, true}},
	}
	whole, err := unary(client, request)
	if err != nil {
		return err
	}
	streamed, err := execute(client, request)
	if err != nil {
		return err
	}
	gradients := append(whole.InputGrad.GetData(), whole.GridGrad.GetData()...)
	fmt.Printf("unary: %d bytes from %s\n", len(gradients), whole.Info.Device)
	if !bytes.Equal(append(streamed.InputGrad.GetData(), streamed.GridGrad.GetData()...), gradients) {
		return fmt.Errorf("streamed: other bits")
	}
	fmt.Println("streamed: the same bits")
	request.InterpolationMode = proto.Int64(7)
	for _, each := range []call{unary, execute} {
		_, err := each(client, request)
		if refused, ok := err.(*serviceError); ok {
			fmt.Print("refused: ", refused.info.Reason, " ", refused.info.Metadata["code"])
			for _, rule := range refused.broken.FieldViolations {
				fmt.Print(" ", rule.Reason, ": ", rule.Description)
			}
			fmt.Println()
		}
	}
	if file != "" {
		return os.WriteFile(file, gradients, 0o666)
	}
	return nil
}

func main() {
	arguments := append(os.Args[1:], "", "")
	if err := run(arguments[0], arguments[1]); err != nil {
		reason := "not from the service"
		if refused, ok := err.(*serviceError); ok && refused.info.Reason != "" {
			reason = refused.info.Reason
		}
		fmt.Fprintf(os.Stderr, "%s: %v\n", reason, err)
		os.Exit(1)
	}
}
